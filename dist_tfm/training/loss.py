"""Label-smoothed cross-entropy, summed over real target tokens (Vaswani et al. 2017, section 5.4).

With p the model's distribution over V tokens, y the right one, eps the smoothing:

    loss = (1 - eps) * -log p(y) + eps * (1/V) * sum over all v of -log p(v)

eps is spread over ALL V entries, y included. nll = -log p(y) is reported beside it, without smoothing.
Shapes: B batch, S source, T target, D d_model, V vocabulary, N real target tokens of the micro-batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.api import PAD
from dist_tfm.model.layers import LayerRunner, run_plainly
from dist_tfm.model.packed import pack
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Alone, Axis
from dist_tfm.parallel.layers import VocabularyShard, enter
from dist_tfm.parallel.stages import Stage
from dist_tfm.training.projected_loss import projected_loss
from dist_tfm.training.smoothing import RowLoss, Statistics, combine, local_statistics, losses, row_loss, slopes_

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in fp32 at a time (64 MiB): a whole fp32 copy of them would be the largest tensor of a step."""


class _SmoothedCrossEntropy(torch.autograd.Function):
    """(sum of smoothed losses, sum of nll) from one logsumexp; backward writes softmax minus smoothed target into one
    buffer of the logits' dtype. Arithmetic in fp32 (float64 stays), a chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, smoothing: float, vocabulary: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        targets, here = vocabulary.local(labels)
        partition, target, total = torch.empty((3, *labels.shape), dtype=exact, device=logits.device)
        for rows in _row_chunks(logits):
            found = local_statistics(logits[rows].to(exact), targets[rows])
            partition[rows], target[rows], total[rows] = found
        if labels.numel():  # all ranks of the axis have the same labels
            partition, target, total = combine(Statistics(partition, target, total), here, vocabulary)
        loss, nll = losses(partition, target, total, smoothing, vocabulary)
        ctx.save_for_backward(logits, targets, here, partition)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        nll_sum = nll.sum()
        ctx.mark_non_differentiable(nll_sum)
        return loss.sum(), nll_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, here, partition = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            scores = logits[rows].to(partition.dtype, copy=True)
            slopes = slopes_(scores, partition[rows], targets[rows], here[rows], ctx.smoothing, ctx.vocabulary)
            result[rows] = slopes.mul_(grads[0])
        return result, None, None, None


def smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, vocabulary: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    """logits [N, V], labels [N], none of them a pad: (loss_sum, nll_sum), scalars in fp32 (float64 for float64 logits).

    loss_sum has a gradient, nll_sum has none. N may be 0: both are then exactly 0.
    vocabulary: the shard that logits [N, high - low] score, where V is divided over ranks; None: they are all scores.
    Raises ValueError for logits that are not those of the shard.
    """
    shard = VocabularyShard(Alone(), logits.size(-1)) if vocabulary is None else vocabulary
    if logits.size(-1) != shard.high - shard.low:
        raise ValueError(f"expected scores of tokens {shard.low} to {shard.high}, found {logits.size(-1)} scores")
    loss_sum, nll_sum = _SmoothedCrossEntropy.apply(logits, labels, smoothing, shard)  # type: ignore[no-untyped-call]
    return loss_sum, nll_sum


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    vocabulary: VocabularyShard,
    bias: Tensor | None = None,
    of_rows: RowLoss = row_loss,
) -> tuple[Tensor, Tensor]:
    """hidden [N, D] through the projection weight [high - low, D] and, if there is one, bias [high - low], to
    `smoothed_cross_entropy` of labels [N].

    The one place where scores over the vocabulary are made in training: a chunk of rows at a time, but in fp16, where
    the gradients of an unscaled loss, which that computes, would vanish.
    """
    entered = enter(hidden, vocabulary.axis)
    if hidden.dtype == torch.float16:
        return smoothed_cross_entropy(F.linear(entered, weight, bias), labels, smoothing, vocabulary)
    return projected_loss(entered, weight, labels, smoothing, vocabulary, bias, of_rows)


class TranslationLoss(nn.Module):
    """The model and its loss as one module, which an engine trains. The sums are left undivided: the one division, by
    the step's number of target tokens over all ranks and micro-batches, is the engine's.

    tensor: the axis over which the model was divided, if it was (`parallel.plan.divide`). of_rows: what turns scores
    into losses and slopes.
    """

    def __init__(
        self,
        model: Transformer,
        label_smoothing: float,
        tensor: Axis | None = None,
        of_rows: RowLoss = row_loss,
    ) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self._vocabulary = VocabularyShard(Alone() if tensor is None else tensor, model.vocab_size)
        self._of_rows = of_rows

    def forward(
        self, source: Tensor, target_in: Tensor, labels: Tensor, run: LayerRunner = run_plainly
    ) -> tuple[Tensor, Tensor]:
        """source [B, S], target_in [B, T], labels [B, T] (int64): (loss_sum, nll_sum) over labels that are not PAD.

        Where model.packed is set, the sentences are laid end to end first: the sums are the same. nll_sum is detached
        and unsmoothed. Without any real label loss_sum is exactly 0 and so is every gradient.
        """
        # Before the model is launched: on a GPU `pack` and `nonzero` wait for the device, which costs least here.
        segments = None
        if self.model.packed:
            source, target_in, labels, segments = pack(source, target_in, labels, PAD)
        real = real_positions(labels)
        return self.of_hidden(self.model(source, target_in, run, segments), labels, real)

    def of_hidden(self, hidden: Tensor, labels: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of `forward`, from the decoder's hidden states [B, T, D]; real: `real_positions(labels)`."""
        return projected_cross_entropy(
            hidden.flatten(0, 1).index_select(0, real),
            self.model.output_weight,
            labels.flatten().index_select(0, real),
            self.label_smoothing,
            self._vocabulary,
            self.model.output_bias,
            self._of_rows,
        )


def real_positions(labels: Tensor) -> Tensor:
    """labels [B, T] to the places [N] in their flat order that are not PAD."""
    return (labels.flatten() != PAD).nonzero().squeeze(-1)


class StageLoss(nn.Module):
    """A pipeline stage as one module, which an engine trains; on the last stage with the loss.

    loss: over the stage's part of the model; its parameters are this module's.
    """

    def __init__(self, loss: TranslationLoss, stage: Stage) -> None:
        super().__init__()
        self.loss = loss
        self.stage = stage

    def forward(
        self, source: Tensor, target_in: Tensor, labels: Tensor, run: LayerRunner, *received: Tensor
    ) -> tuple[Tensor, ...]:
        """The hidden states that the stage hands on (`Stage.forward`), on the last stage (loss_sum, nll_sum)."""
        if not self.stage.is_last:
            return self.stage.forward(source, target_in, run, *received)
        real = real_positions(labels)
        (hidden,) = self.stage.forward(source, target_in, run, *received)
        return self.loss.of_hidden(hidden, labels, real)


def _row_chunks(logits: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.size(-1))
    return [slice(first, first + size) for first in range(0, logits.size(0), size)]
