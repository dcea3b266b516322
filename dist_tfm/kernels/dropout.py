"""Dropout whose mask is computed, not stored: a number for each (seed, position), drawn again in the backward pass.

The numbers are a hash of seed and position (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", name the
idea), so that threads need no common state. The seed comes from torch's generator, one draw a call: what seeds that
generator decides the mask, as it does for torch's own dropout.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from dist_tfm.kernels.native import Kernels, keep_rule, spread

_LOW = 0xFFFFFFFF


class _CountedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels, seed: int, probability: float) -> Tensor:
        ctx.settings = kernels, seed, probability
        return kernels.dropout(x.contiguous(), seed, probability)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        kernels, seed, probability = ctx.settings
        return kernels.dropout(grads[0].contiguous(), seed, probability), None, None, None


class CountedDropout(nn.Dropout):
    """torch.nn.Dropout with a mask that is computed where it is needed; nothing is kept for the backward pass."""

    def __init__(self, p: float, kernels: Kernels) -> None:
        super().__init__(p)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape, in bf16 or fp32; draws one number from torch's generator where it is training and p > 0."""
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(1 << 62, ()))
        return cast(Tensor, _CountedDropout.apply(x, self._kernels, seed, self.p))  # type: ignore[no-untyped-call]


def drawn_numbers(seed: int, count: int) -> Tensor:
    """The numbers from 0 to 2^32 - 1 of positions 0 to count - 1 [count], in plain torch: two rounds of a hash, before
    each of which half of a 64-bit key, made of the seed, is mixed in."""
    key = spread(seed)
    return _mix(_mix((torch.arange(count) + (key & _LOW)) & _LOW) ^ (key >> 32))


def dropout_plainly(x: Tensor, seed: int, probability: float) -> Tensor:
    """What `Kernels.dropout` computes, bit for bit, in plain torch."""
    threshold, scale = keep_rule(x, probability)
    kept = (drawn_numbers(seed, x.numel()) >= threshold).view(x.shape)
    return (x.float() * torch.where(kept, torch.tensor(scale, dtype=torch.float32), 0.0)).to(x.dtype)


def _mix(x: Tensor) -> Tensor:
    """A permutation of numbers below 2^32 (Wellons' "lowbias32"), in int64, whose products wrap around."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
