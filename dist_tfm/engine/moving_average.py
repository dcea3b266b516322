"""An exponential moving average of the master weights, divided over ranks as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor


class MovingAverage:
    """a <- d a + (1 - d) w after each update, where update u (from 1) has d = min(decay, (1 + u) / (10 + u)).

    The smaller decay of the first updates (as in TensorFlow's ExponentialMovingAverage) keeps the initial weights from
    staying in the average for 1 / (1 - decay) updates. It depends on u alone, which checkpoints hold.

    weights: the tensors that the optimizer changes on this rank (ZeRO partitions; at stage 0 whole parameters).
    """

    tensors: dict[Tensor, Tensor]
    """The average of each of `weights`, of the same layout."""

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self._decay = decay
        self.tensors = {weight: weight.detach().clone() for weight in weights}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Takes the weights after update number `updates` in."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(list(self.tensors.values()), [w.detach() for w in self.tensors], 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the contents of weights and averages, bit for bit, one tensor at a time."""
        for weight, average in self.tensors.items():
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)
