"""Multi-head scaled dot-product attention (Vaswani et al. 2017, section 3.2), with interchangeable kernels.

Shapes: B batch, Tq queries, Tk keys, D d_model, H heads, Dk width of a head's queries and keys, Dv of its values.
Masks are boolean, True = visible: see `dist_tfm.model.attention_kernels`.
"""

from functools import partial
from typing import Literal, NamedTuple, cast

from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention_kernels import (
    Attend,
    ExactBackend,
    Weighting,
    attend_matmul,
    attend_reference,
    attend_sdpa,
    chosen_backend,
)
from dist_tfm.model.flex_attention import FlexAttend
from dist_tfm.model.packed import Lengths, Segments, attend_packed
from dist_tfm.model.positions import RelativePositions, RotaryPositions

BackendName = Literal["auto"] | ExactBackend


class KeysValues(NamedTuple):
    """Projected keys [B, G, Tk, Dk] and values [B, G, Tk, Dv] of one attention; G = H, or fewer if heads share them."""

    keys: Tensor
    values: Tensor


def padding_mask(ids: Tensor, pad: int) -> Tensor:
    """[B, Tk] ids to the mask [B, 1, 1, Tk] that hides pads."""
    return (ids != pad)[:, None, None, :]


def attend_auto(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """The kernel that `chosen_backend` names for these inputs."""
    return attention_kernel(chosen_backend(query.device, query.dtype))(query, key, value, weighting)


def _attend_reference_output(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    return attend_reference(query, key, value, weighting).output


def attention_kernel(name: BackendName) -> Attend:
    """The kernel that the configuration names (model.attention)."""
    return _KERNELS[name]


def kernel_name(attend: Attend) -> BackendName:
    """The name of a kernel that `attention_kernel` gave. Raises ValueError for any other function."""
    for name, kernel in _KERNELS.items():
        if kernel is attend:
            return name
    raise ValueError(f"expected an attention kernel of this module, found {attend!r}")


_KERNELS: dict[BackendName, Attend] = {
    "auto": attend_auto,
    "sdpa": attend_sdpa,
    "matmul": attend_matmul,
    "reference": _attend_reference_output,
    "flex": FlexAttend(),
}


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: H heads over projections; d_k and d_v need not be d_model / H (Table 3, rows B).

    With G = kv_heads < H, each group of H / G heads shares its keys and values (Ainslie et al. 2023, "GQA"). `rotary`
    turns queries and keys by their positions, `relative` adds to their scores: for self-attention only, where both have
    positions.
    Parameters: query.weight [H*Dk, D], key.weight [G*Dk, D], value.weight [G*Dv, D], output.weight [D, H*Dv], with
    model.attention_bias the biases of these, and relative.weight [H, buckets].
    """

    def __init__(
        self,
        config: ModelConfig,
        attend: Attend,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
    ) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.key_value_heads
        self.rotary = rotary
        self.relative = relative
        self.dropout = config.attention_dropout
        self.attend = attend
        # What a kernel for packed sentences may take the place of: it knows no bias.
        self.fused = config.attention in ("auto", "sdpa") and relative is None
        bias = config.attention_bias
        self.query = nn.Linear(config.d_model, config.heads * config.key_width, bias=bias)
        self.key = nn.Linear(config.d_model, config.key_value_heads * config.key_width, bias=bias)
        self.value = nn.Linear(config.d_model, config.key_value_heads * config.value_width, bias=bias)
        self.output = nn.Linear(config.heads * config.value_width, config.d_model, bias=bias)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | Segments | None, causal: bool) -> Tensor:
        """Queries from x [B, Tq, D], keys and values from memory [B, Tk, D] (x in self-attention): [B, Tq, D].

        mask: of a packed batch (B = 1), the segments.
        """
        queries, keys = mask if isinstance(mask, Segments) else (0, 0)
        return self.attend_to(x, self.keys_values(memory, keys), mask, causal, queries)

    def keys_values(self, memory: Tensor, first: int | Lengths = 0) -> KeysValues:
        """Keys and values of memory [B, Tk, D] at positions first, ..., which decoding computes once and keeps."""
        keys, values = (_split(part, self.kv_heads) for part in (self.key(memory), self.value(memory)))
        return KeysValues(keys if self.rotary is None else self.rotary.rotate(keys, first), values)

    def attend_to(
        self, x: Tensor, known: KeysValues, mask: Tensor | Segments | None, causal: bool, first: int | Lengths = 0
    ) -> Tensor:
        """Queries from x [B, Tq, D] at positions first, ... over projected keys and values: [B, Tq, D]."""
        query = _split(self.query(x), self.heads)
        if self.rotary is not None:
            query = self.rotary.rotate(query, first)
        keys, values = (_repeat(part, self.heads // self.kv_heads) for part in known)
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, Segments):
            within = None if self.relative is None else partial(self.relative.bias, 0)
            weighting = Weighting(causal=causal, dropout=dropout)
            heads = attend_packed(self.attend, self.fused, query, keys, values, mask, weighting, within)
        else:
            bias = self._bias(first, query.size(2), keys.size(2))
            heads = self.attend(query, keys, values, Weighting(mask, causal, dropout, bias))
        return cast(Tensor, self.output(heads.transpose(1, 2).flatten(2)))

    def _bias(self, first: int | Lengths, queries: int, keys: int) -> Tensor | None:
        """What is added to the scores of a padded batch, [1, H, Tq, Tk]."""
        if self.relative is None or isinstance(first, Lengths):
            return None
        return self.relative.bias(first, queries, keys)


def _split(projected: Tensor, heads: int) -> Tensor:
    """[B, T, H*W] to [B, H, T, W]."""
    batch, length, width = projected.shape
    return projected.view(batch, length, heads, width // heads).transpose(1, 2)


def _repeat(part: Tensor, times: int) -> Tensor:
    """[B, G, T, W] to [B, G * times, T, W], each head `times` times in a row."""
    return part if times == 1 else part.repeat_interleave(times, dim=1)
