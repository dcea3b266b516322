"""Label-smoothed cross-entropy, summed over real target tokens (Vaswani et al. 2017, section 5.4).

With p the model's distribution over V tokens, y the right one, eps the smoothing:

    loss = (1 - eps) * -log p(y) + eps * (1/V) * sum over all v of -log p(v)

eps is spread over ALL V entries, y included. nll = -log p(y) is reported beside it, without smoothing.
Shapes: B batch, S source, T target, D d_model, V vocabulary, N real target tokens of the micro-batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.api import PAD
from dist_tfm.model.layers import LayerRunner, run_plainly
from dist_tfm.model.transformer import Transformer

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in fp32 at a time (64 MiB): a whole fp32 copy of them would be the largest tensor of a step."""


class _SmoothedCrossEntropy(torch.autograd.Function):
    """(sum of smoothed losses, sum of nll) from one logsumexp; backward writes softmax minus smoothed target into one
    buffer of the logits' dtype. Arithmetic in fp32 (float64 stays), a chunk of rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        log_partition = torch.empty(labels.shape, dtype=exact, device=logits.device)
        loss_sum, nll_sum = (torch.zeros((), dtype=exact, device=logits.device) for _ in range(2))
        for rows in _row_chunks(logits):
            scores = logits[rows].to(exact)
            partition = scores.logsumexp(-1)
            nll = partition - scores.gather(-1, labels[rows, None]).squeeze(-1)
            uniform = partition - scores.mean(-1)
            log_partition[rows] = partition
            nll_sum += nll.sum()
            loss_sum += ((1.0 - smoothing) * nll + smoothing * uniform).sum()
        ctx.save_for_backward(logits, labels, log_partition)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_partition = ctx.saved_tensors
        smoothing = ctx.smoothing
        result = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            partition = log_partition[rows, None]
            slope = (logits[rows].to(partition.dtype) - partition).exp_()
            slope -= smoothing / logits.size(-1)
            target = labels[rows, None]
            slope.scatter_add_(-1, target, torch.full_like(target, -(1.0 - smoothing), dtype=slope.dtype))
            result[rows] = slope.mul_(grads[0])
        return result, None, None


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """logits [N, V], labels [N], none of them a pad: (loss_sum, nll_sum), scalars in fp32 (float64 for float64 logits).

    loss_sum has a gradient, nll_sum has none. N may be 0: both are then exactly 0.
    """
    loss_sum, nll_sum = _SmoothedCrossEntropy.apply(logits, labels, smoothing)  # type: ignore[no-untyped-call]
    return loss_sum, nll_sum


class TranslationLoss(nn.Module):
    """The model and its loss as one module, which an engine trains. The sums are left undivided: the one division, by
    the step's number of target tokens over all ranks and micro-batches, is the engine's.
    """

    def __init__(self, model: Transformer, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(
        self, source: Tensor, target_in: Tensor, labels: Tensor, run: LayerRunner = run_plainly
    ) -> tuple[Tensor, Tensor]:
        """source [B, S], target_in [B, T], labels [B, T] (int64): (loss_sum, nll_sum) over labels that are not PAD.

        nll_sum is detached and unsmoothed. Without any real label loss_sum is exactly 0 and so is every gradient.
        """
        # Before the model is launched: on a GPU `nonzero` waits for the device, which costs least here.
        real = (labels.flatten() != PAD).nonzero().squeeze(-1)
        hidden: Tensor = self.model(source, target_in, run)
        logits = self.model.logits(hidden.flatten(0, 1).index_select(0, real))
        return smoothed_cross_entropy(logits, labels.flatten().index_select(0, real), self.label_smoothing)


def _row_chunks(logits: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.size(-1))
    return [slice(first, first + size) for first in range(0, logits.size(0), size)]
