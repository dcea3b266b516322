"""The arithmetic of label-smoothed cross-entropy (formula in `dist_tfm.training.loss`), over a vocabulary that may be
divided over ranks: what a rank finds in its own scores, what all ranks make of it, and the gradient.

Shapes: N rows, V_r tokens of this rank's shard, V of the whole vocabulary. All of it in the dtype of the scores given,
which is fp32 or float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dist_tfm.parallel.layers import VocabularyShard


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
