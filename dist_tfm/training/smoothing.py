"""The arithmetic of label-smoothed cross-entropy (formula in `dist_tfm.training.loss`), over a vocabulary that may be
divided over ranks: what a rank finds in its own scores, what all ranks make of it, and the gradient.

Shapes: N rows, V_r tokens of this rank's shard, V of the whole vocabulary. All of it in the dtype of the scores given,
which is fp32 or float64, but for a `RowLoss`, which takes scores of any dtype and computes in fp32 or float64.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dist_tfm.parallel.layers import VocabularyShard

BLOCK_ELEMENTS = 1 << 18
"""Scores that a CPU takes up at a time, so that the fp32 copy (1 MiB) is still in its cache from one operator to the
next; other devices, and ranks that must tell each other of all rows, take all of them."""


class Goal(NamedTuple):
    """What the scores of some rows are held against: the right token's place in the shard [N], whether this rank has it
    [N], the share of the target that all tokens have, the vocabulary."""

    targets: Tensor
    here: Tensor
    smoothing: float
    vocabulary: VocabularyShard

    def of(self, rows: slice) -> "Goal":
        """That of some of the rows."""
        return self._replace(targets=self.targets[rows], here=self.here[rows])


class RowLoss(Protocol):
    """scores [N, V_r], to which bias [V_r] is still to be added: sums over rows of smoothed loss and nll, [2]. Where
    `differentiate`, the gradient of the summed loss in the scores is written over them, in their dtype; else what is in
    them afterwards means nothing."""

    def __call__(self, scores: Tensor, bias: Tensor | None, goal: Goal, differentiate: bool) -> Tensor: ...


class Statistics(NamedTuple):
    """Of each row [N]: logarithm of the sum of exponentials, score of the right token, sum of scores."""

    partition: Tensor
    target: Tensor
    total: Tensor


def local_statistics(scores: Tensor, targets: Tensor) -> Statistics:
    """scores [N, V_r]; targets [N]: the right token's place in the shard, any place where another rank has it."""
    return Statistics(scores.logsumexp(-1), scores.gather(-1, targets[:, None]).squeeze(-1), scores.sum(-1))


def combine(local: Statistics, here: Tensor, vocabulary: VocabularyShard) -> Statistics:
    """The statistics over the whole vocabulary; here [N]: whether this rank has the right token.

    Ranks tell each other four numbers a row and never a score. Collective over the axis, if that has more than one
    rank; all its ranks have the same rows, and at least one.
    """
    if vocabulary.axis.size == 1:
        return local
    largest = vocabulary.axis.maximum(local.partition)
    parts = torch.stack(((local.partition - largest).exp_(), local.target.masked_fill(~here, 0.0), local.total))
    partition, target, total = vocabulary.axis.sum(parts)
    return Statistics(partition.log() + largest, target, total)


def losses(
    partition: Tensor, target: Tensor, total: Tensor, smoothing: float, vocabulary: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Smoothed loss and nll of each row [N], from the statistics over the whole vocabulary."""
    nll = partition - target
    return (1.0 - smoothing) * nll + smoothing * (partition - total / vocabulary.size), nll


def slopes_(
    scores: Tensor, partition: Tensor, targets: Tensor, here: Tensor, smoothing: float, vocabulary: VocabularyShard
) -> Tensor:
    """Gradient of the summed loss in the scores [N, V_r], softmax minus smoothed target, written over the scores."""
    slopes = scores.sub_(partition[:, None]).exp_()
    slopes -= smoothing / vocabulary.size
    return slopes.scatter_add_(-1, targets[:, None], here[:, None].to(slopes.dtype) * (smoothing - 1.0))


def row_loss(scores: Tensor, bias: Tensor | None, goal: Goal, differentiate: bool) -> Tensor:
    """The `RowLoss` in plain torch, for any dtype, device and division of the vocabulary."""
    exact = torch.promote_types(scores.dtype, torch.float32)
    sums = torch.zeros(2, dtype=exact, device=scores.device)
    for rows in _blocks(scores, goal.vocabulary):
        part, block = goal.of(rows), scores[rows].to(exact)  # itself, where it is in that dtype
        if bias is not None:
            block += bias
        partition, target, total = combine(local_statistics(block, part.targets), part.here, part.vocabulary)
        loss, nll = losses(partition, target, total, part.smoothing, part.vocabulary)
        sums += torch.stack((loss.sum(), nll.sum()))
        if differentiate:
            scores[rows] = slopes_(block, partition, part.targets, part.here, part.smoothing, part.vocabulary)
    return sums


def _blocks(scores: Tensor, vocabulary: VocabularyShard) -> list[slice]:
    rows, size = scores.shape
    step = rows
    if scores.device.type == "cpu" and vocabulary.axis.size == 1:
        step = max(1, BLOCK_ELEMENTS // size)
    return [slice(first, first + step) for first in range(0, rows, step)]
