"""Projection onto the vocabulary and label-smoothed cross-entropy as one function that never holds all logits.

Rows are taken a chunk at a time: their logits are made, turned into losses and at once into the gradients of hidden
states and weight, and dropped. The gradients are made in the forward pass, which has the logits anyway; the backward
pass scales them. (With the logits of N tokens kept, they, their gradient and their fp32 copies are the largest tensors
of a step: N x V, where this needs N x D and V x D.)
Shapes: N real target tokens, D d_model, V vocabulary, C rows of a chunk.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dist_tfm.parallel.layers import VocabularyShard
from dist_tfm.training.smoothing import Goal, RowLoss, row_loss

CHUNK_BYTES = 1 << 27
"""Logits that are held at a time, in bytes: 2,097 rows of a vocabulary of 32,000 in bf16, half of them in fp32."""


class _ProjectedCrossEntropy(torch.autograd.Function):
    """(sum of smoothed losses, sum of nll); statistics and the weight's sum over chunks in fp32 (float64 stays)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        vocabulary: VocabularyShard,
        differentiate: bool,
        of_rows: RowLoss,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        goal = Goal(*vocabulary.local(labels), smoothing, vocabulary)
        chunks = row_chunks(len(labels), vocabulary, hidden.element_size())
        sums = torch.zeros(2, dtype=exact, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if differentiate else None
        # A single chunk's product is the sum itself: no second buffer.
        many = differentiate and len(chunks) != 1
        of_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if many else None
        of_bias = None if bias is None else torch.zeros(bias.shape, dtype=exact, device=bias.device)
        for rows in chunks:
            scores = hidden[rows] @ weight.t()
            sums += of_rows(scores, bias, goal.of(rows), differentiate)
            if of_hidden is None:
                continue
            if of_bias is not None:
                of_bias += scores.sum(0, dtype=exact)  # which are the slopes now
            torch.mm(scores, weight, out=of_hidden[rows])
            product = scores.t() @ hidden[rows]
            of_weight = product if of_weight is None else of_weight.add_(product)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        loss_sum, nll_sum = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *others = ctx.saved_tensors
        of_weight, of_bias = (
            None if total is None else (total * grads[0]).to(dtype)
            for total, dtype in zip(others, ctx.dtypes, strict=True)
        )
        return of_hidden * grads[0], of_weight, of_bias, None, None, None, None, None


def projected_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    vocabulary: VocabularyShard,
    bias: Tensor | None = None,
    of_rows: RowLoss = row_loss,
) -> tuple[Tensor, Tensor]:
    """hidden [N, D], weight [high - low, D], labels [N], none of them a pad: (loss_sum, nll_sum), as
    `dist_tfm.training.loss.smoothed_cross_entropy` of the logits hidden weight^T + bias, bias [high - low].

    of_rows: what turns scores into losses and slopes. Under autocast the products are computed in its dtype, as a
    linear layer's are. Raises ValueError for a weight that is not that of the shard.
    """
    if weight.size(0) != vocabulary.high - vocabulary.low:
        raise ValueError(
            f"expected rows of tokens {vocabulary.low} to {vocabulary.high}, found a matrix of {weight.size(0)} rows"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        sums = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, smoothing, vocabulary, torch.is_grad_enabled(), of_rows
        )
    return cast(tuple[Tensor, Tensor], sums)


def row_chunks(rows: int, vocabulary: VocabularyShard, element_size: int) -> list[slice]:
    """Cuts rows so that a chunk's logits take about CHUNK_BYTES; all ranks of a divided vocabulary, whose shards differ
    by a token, cut alike, since they exchange statistics chunk by chunk."""
    size = max(1, CHUNK_BYTES // (element_size * -(-vocabulary.size // vocabulary.axis.size)))
    return [slice(first, first + size) for first in range(0, rows, size)]
