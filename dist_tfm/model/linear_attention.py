"""Linear (kernel) attention (Katharopoulos et al. 2020, "Transformers are RNNs", equations 7 to 12).

An approximation: softmax's exp(q k / sqrt(d_k)) gives way to phi(q) phi(k), phi(x) = elu(x) + 1. Another function than
full attention, in time and memory that grow with the length, not its square. Here it is computed in two ways, whose
results differ by rounding alone: by the product of all queries with all keys where queries are few (a cached decoder's
are), else by sums over keys.
Shapes: B batch, H heads, Tq queries, Tk keys, Dk and Dv widths of a head, C positions of a block, N blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_tfm.model.attention_kernels import Weighting, causal_mask

BLOCK = 64
"""Positions within which causal attention is a product of queries with keys; sums go from block to block."""


def attend_linear(query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
    """sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j), all of it in fp32 (float64 stays).

    See `dist_tfm.model.attention_kernels.Attend`; a query that sees no key yields zeros. Raises ValueError for what
    needs weights to exist: a bias, dropout on them, a mask [B, 1, Tq, Tk] of its own for each query.
    """
    mask, causal, dropout, bias = weighting
    if bias is not None or dropout or (mask is not None and mask.size(2) != 1):
        raise ValueError(
            "linear attention has no scores: expected no bias, no dropout on them and a mask of keys alone"
        )
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        queries, keys = (F.elu(part.to(exact)) + 1.0 for part in (query, key))
        if mask is not None:
            keys = keys * mask.transpose(2, 3)  # [B, 1, Tk, 1]
        few = query.size(2) <= key.size(3) or (causal and query.size(2) != key.size(2))
        way = _by_products if few else _by_blocks if causal else _by_sums
        total, weight = way(queries, keys, value.to(exact), causal)
        return (total / weight.masked_fill(weight == 0, 1.0)).to(query.dtype)


def _by_products(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(weighted sum of values [B, H, Tq, Dv], sum of weights [B, H, Tq, 1]), through all weights [B, H, Tq, Tk]."""
    weights = query @ key.transpose(2, 3)
    if causal:
        weights = weights * causal_mask(query.size(2), key.size(2), query.device)
    return weights @ value, weights.sum(-1, keepdim=True)


def _by_sums(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same where every query sees every key, through one sum [B, H, Dk, Dv]."""
    return query @ (key.transpose(2, 3) @ value), query @ key.sum(2).unsqueeze(-1)


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same where queries see the keys up to their own: products within a block, and the sums [B, H, Dk, Dv] of all
    blocks before it."""
    batch, heads, length, _ = query.shape
    padding = -length % BLOCK  # keys of zeros weigh nothing
    blocks = [F.pad(part, (0, 0, 0, padding)) for part in (query, key, value)]
    query, key, value = (part.view(batch, heads, -1, BLOCK, part.size(3)) for part in blocks)
    within = (query @ key.transpose(3, 4)) * causal_mask(BLOCK, BLOCK, query.device)
    sums, weights = key.transpose(3, 4) @ value, key.sum(3).unsqueeze(-1)
    before = [part.cumsum(2) - part for part in (sums, weights)]
    total = within @ value + query @ before[0]
    weight = within.sum(-1, keepdim=True) + query @ before[1]
    return total.flatten(2, 3)[:, :, :length], weight.flatten(2, 3)[:, :, :length]
