"""Attention by torch's flex_attention: blocks of scores that nothing is seen of are never computed.

Which blocks those are follows from causality and the window alone, so that one block mask serves every batch of a
shape; pads are hidden inside blocks. Fused by Triton on a GPU. On a CPU torch has no backward pass and, uncompiled,
makes all scores: good for decoding a model that was trained with it.
Shapes: B batch, H heads, Tq queries, Tk keys, r window.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dist_tfm.model.attention_kernels import Weighting, check

MOST_GRAPHS = 64
"""That torch compiles: sizes and numbers of blocks of 1, a mask or none, gradients or none have graphs of their own."""


class FlexAttend:
    """`dist_tfm.model.attention_kernels.Attend` by flex_attention, of all keys or of a sliding window.

    window: r, as in `dist_tfm.model.window_attention`, with the same result, or None: everything.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """As `Attend`. Raises ValueError for what flex_attention has not: dropout, a bias, gradients on a CPU."""
        check(query, key, value, weighting)
        if weighting.dropout or weighting.bias is not None:
            raise ValueError("flex attention: expected no dropout of weights and no bias of scores")
        on_cpu = query.device.type == "cpu"
        if on_cpu and any(side.requires_grad for side in (query, key, value)):
            raise ValueError("flex attention: torch has no backward pass for it on a CPU; expected torch.no_grad()")
        blocks = _blocks(query.size(2), key.size(2), weighting.causal, self._window, query.device)
        hide = None if weighting.mask is None else _hiding(weighting.mask[:, 0])
        if on_cpu:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # this module says so
                return flex_attention(query, key, value, score_mod=hide, block_mask=blocks)
        # A run has more kinds of batches than torch's own limit (8).
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
            return _compiled()(query, key, value, score_mod=hide, block_mask=blocks)


@cache
def _compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """flex_attention for a GPU, with sizes as symbols: one kernel for all shapes.

    In one graph or not at all (fullgraph): what torch cannot compile, or will not for the number of graphs, would
    otherwise run uncompiled, with all scores in memory, and say nothing.
    """
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend))


@lru_cache(maxsize=256)
def _blocks(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> BlockMask:
    """Which blocks of scores are computed, alike for all sentences and heads, queries aligned to the lower right.

    What differs from shape to shape is in tensors: numbers would be constants of the compiled kernel, and a few dozens
    of those are more than torch compiles of one function.
    """
    unlimited = queries + keys
    reach = unlimited if window is None else window
    shift, behind, ahead = (torch.tensor(n, device=device) for n in (keys - queries, -reach, 0 if causal else reach))

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        distance = column - row - shift
        return (distance >= behind) & (distance <= ahead)

    return create_block_mask(seen, None, None, queries, keys, device=str(device))


def _hiding(visible: Tensor) -> Callable[..., Tensor]:
    """What hides, in the scores, the keys that visible [B, 1 or Tq, Tk] says no of."""
    if visible.size(1) == 1:
        keys = visible[:, 0]

        def by_key(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return torch.where(keys[batch, column], score, -math.inf)

        return by_key

    def by_query(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(visible[batch, row, column], score, -math.inf)

    return by_query
