"""Compiled kernels in the places of torch's operators (train.kernels: native), on a CPU.

They take the rows of the loss and dropout. The rows of a vocabulary that is divided over ranks stay with torch, since
ranks must tell each other of them in between.
"""

import torch
from torch import Tensor, nn

from dist_tfm.kernels.dropout import CountedDropout
from dist_tfm.kernels.native import Kernels
from dist_tfm.model.dropout import Dropout
from dist_tfm.training.smoothing import Goal, row_loss


class NativeRowLoss:
    """The `dist_tfm.training.smoothing.RowLoss` of compiled kernels, for scores in bf16 or fp32: `row_loss` but for
    rounding."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, scores: Tensor, bias: Tensor | None, goal: Goal, differentiate: bool) -> Tensor:
        """See `RowLoss`."""
        if goal.vocabulary.axis.size > 1:
            return row_loss(scores, bias, goal, differentiate)
        loss, nll = self._kernels.cross_entropy_(scores, bias, goal.targets, goal.smoothing, differentiate)
        return torch.stack((loss.sum(), nll.sum()))


def use_counted_dropout(model: nn.Module, kernels: Kernels) -> None:
    """Puts a `CountedDropout` into the place of every `Dropout` of `model`. Attention's own dropout on probabilities
    (model.attention_dropout) is a function of its kernel, and stays."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, CountedDropout(child.p, kernels))
