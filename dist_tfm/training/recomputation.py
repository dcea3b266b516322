"""What is computed again in the backward pass instead of being kept: `train.activation_checkpointing`.

Whole layers (Chen et al. 2016) are run again by `training.randomness.SeededRunner`, which knows their numbers. Inside a
layer two parts hold much for little work: the core of attention, between its projections (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 5), whose scores grow with the square of the
length, and the feed-forward layer, whose inner states are d_ff wide. Gradients are those of keeping everything, bit for
bit.
"""

from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from dist_tfm.model.attention import MultiHeadAttention
from dist_tfm.model.attention_kernels import Attend, Weighting
from dist_tfm.model.layers import DecoderLayer, EncoderLayer
from dist_tfm.model.norm import Sublayer

Inside = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class Recomputation:
    """layers: 0, or every how many encoder and decoder layers one is computed again; inside: what of each layer is."""

    layers: int = 0
    inside: Inside | None = None


def recomputation(policy: str) -> Recomputation:
    """What a value of train.activation_checkpointing asks for. Raises ValueError for any other text."""
    if policy in ("attention", "feed_forward"):
        return Recomputation(inside=cast(Inside, policy))
    if policy.startswith("every_"):
        return Recomputation(layers=int(policy.removeprefix("every_")))
    return Recomputation(layers={"none": 0, "full": 1}[policy])


def recompute_inside(model: nn.Module, part: Inside | None) -> None:
    """Makes all layers of `model`, divided over tensor-parallel ranks or not, compute `part` again; None: nothing."""
    for module in list(model.modules()):
        if part == "attention" and isinstance(module, MultiHeadAttention):
            module.attend = RecomputedAttend(module.attend)
        elif part == "feed_forward" and isinstance(module, EncoderLayer | DecoderLayer):
            module.run_feed_forward = recomputed_feed_forward


class RecomputedAttend:
    """An attention kernel that keeps its inputs alone. Dropout is drawn again from the state that it was drawn from."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """See `dist_tfm.model.attention_kernels.Attend`."""
        if not is_grad_enabled():
            return self._attend(query, key, value, weighting)
        drawn, arguments = weighting.dropout > 0, (query, key, value, weighting)
        return cast(Tensor, checkpoint(self._attend, *arguments, use_reentrant=False, preserve_rng_state=drawn))


def recomputed_feed_forward(feed_forward: Sublayer, x: Tensor) -> Tensor:
    """feed_forward of x [B, T, D], of which x alone is kept. There is no dropout inside."""
    if not is_grad_enabled():
        return feed_forward(x)
    return cast(Tensor, checkpoint(feed_forward, x, use_reentrant=False, preserve_rng_state=False))
