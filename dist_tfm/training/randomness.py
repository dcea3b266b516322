"""Randomness that is derived, never stored: dropout depends on (seed, step, micro-batch, layer) and on nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dist_tfm.model.initialization import mix
from dist_tfm.model.layers import FIRST_LAYER

__all__ = ["SeededRunner", "mix", "seed_everything_for_layer"]


def seed_everything_for_layer(seed: int) -> None:
    """Seeds the generators that dropout draws from: the CPU's and, where CUDA is in use, the current device's.

    (`torch.manual_seed` does the same for every device of every kind, a hundred times slower.)
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


@dataclass(frozen=True)
class SeededRunner:
    """A `LayerRunner` for one micro-batch of one step: seeds every layer as it starts, so that its dropout is the same
    on any rank, in any order of layers and when recomputed.

    index: the micro-batch's number in the step, -1 for a zero-weight one. checkpointing: every how many encoder and
    decoder layers, counted through the whole model, one keeps only its inputs and is computed again in the backward
    pass, with the same dropout; 0 (or False): none, 1 (or True): all of them.
    """

    seed: int
    step: int
    index: int
    checkpointing: int

    def __call__(self, number: int, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        layer_seed = mix(self.seed, self.step, self.index, number)

        def seeded(*tensors: Any) -> Tensor:
            seed_everything_for_layer(layer_seed)
            return layer(*tensors)

        if not self.checkpointing or number < FIRST_LAYER or (number - FIRST_LAYER) % self.checkpointing:
            return seeded(*inputs)
        # No random state needs keeping: the recomputed function seeds itself.
        return cast(Tensor, checkpoint(seeded, *inputs, use_reentrant=False, preserve_rng_state=False))
