"""Sentences laid end to end instead of padded: no position holds a pad.

A packed batch is one row. Where a padded batch has a mask, it has `Segments`: where each sentence lies among queries
and keys. Attention runs inside the segments, positions restart in each; all else works on each token alone.
Shapes: B sentences, N query and M key positions in all, H heads, Dk and Dv widths of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_tfm.model.attention_kernels import Attend, Weighting

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Lengths:
    """One side of a packed batch: sizes of its sentences, in order; offsets [B + 1] (int32), where each begins and the
    last one ends; positions [N] of the tokens, from 0 in each sentence; longest of the sizes."""

    sizes: tuple[int, ...]
    offsets: Tensor
    positions: Tensor
    longest: int

    @classmethod
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> "Lengths":
        """The side whose sentences have these sizes; 0 for an empty one."""
        starts = [0, *accumulate(sizes)]
        counted = torch.tensor(sizes, device=device)
        before = torch.tensor(starts[:-1], device=device).repeat_interleave(counted, output_size=starts[-1])
        return cls(
            sizes=sizes,
            offsets=torch.tensor(starts, dtype=torch.int32, device=device),
            positions=torch.arange(starts[-1], device=device) - before,
            longest=max(sizes),
        )


class Segments(NamedTuple):
    """The sides that an attention connects: sentence i of the queries sees sentence i of the keys."""

    queries: Lengths
    keys: Lengths

    @property
    def among_queries(self) -> "Segments":
        """Those of the queries' own self-attention."""
        return Segments(self.queries, self.queries)

    @property
    def among_keys(self) -> "Segments":
        """Those of the keys' own self-attention."""
        return Segments(self.keys, self.keys)


class Packed(NamedTuple):
    """A micro-batch without pads: source [1, M], target_in and labels [1, N]; segments: its cross-attention's."""

    source: Tensor
    target_in: Tensor
    labels: Tensor
    segments: Segments


def pack(source: Tensor, target_in: Tensor, labels: Tensor, pad: int) -> Packed:
    """source [B, S], target_in and labels [B, T], padded on the right, to the same sentences laid end to end.

    On a GPU it waits for the device once, to learn the sizes.
    """
    real, heard = target_in != pad, source != pad
    sizes = torch.stack((heard.sum(1), real.sum(1))).tolist()
    keys, queries = (Lengths.of(tuple(side), source.device) for side in sizes)
    return Packed(source[heard][None], target_in[real][None], labels[real][None], Segments(queries, keys))


def varlen_kernel_runs(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], dropout: float) -> bool:
    """Whether torch's kernel for sentences of varying lengths can be used: flash attention on a GPU, in half precision,
    for heads whose keys and values have one `width`, a multiple of 8 up to 256, without attention dropout."""
    key, value = widths
    fits = key == value and key % 8 == 0 and key <= 256
    return device.type == "cuda" and dtype in KERNEL_DTYPES and fits and dropout == 0


def attend_packed(
    attend: Attend,
    fused: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    weighting: Weighting,
    within: Callable[[int, int], Tensor] | None = None,
) -> Tensor:
    """Attention inside segments: query [1, H, N, Dk], key [1, H, M, Dk], value [1, H, M, Dv] to [1, H, N, Dv].

    weighting: without mask and bias; within: gives what is added to the scores of a sentence with so many queries and
    keys, [1, H, Tq, Tk].

    One call of torch's kernel for varying lengths where `fused` allows it and it can run; else a call of `attend` (see
    `dist_tfm.model.attention_kernels.Attend`) for every run of sentences of equal lengths.
    """
    if fused and varlen_kernel_runs(query.device, query.dtype, (query.size(3), value.size(3)), weighting.dropout):
        return _attend_by_kernel(query, key, value, segments, weighting.causal)
    outputs = []
    at_query = at_key = 0
    for (queries, keys), run in groupby(zip(segments.queries.sizes, segments.keys.sizes, strict=True)):
        count = len(list(run))
        q = _rows(query, at_query, count, queries)
        if keys and queries:
            k, v = (_rows(side, at_key, count, keys) for side in (key, value))
            bias = None if within is None else within(queries, keys)
            found = attend(q, k, v, weighting._replace(bias=bias))
        else:  # nothing is seen
            found = q.new_zeros(*q.shape[:3], value.size(3))
        outputs.append(found.transpose(0, 1).flatten(1, 2))
        at_query, at_key = at_query + count * queries, at_key + count * keys
    return torch.cat(outputs, dim=1)[None]


def _rows(side: Tensor, first: int, count: int, size: int) -> Tensor:
    """`count` sentences of one size as a batch: [1, H, N, W] to [count, H, size, W]."""
    heads, _, width = side[0].shape
    return side[0, :, first : first + count * size].reshape(heads, count, size, width).transpose(0, 1)


def _attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # only where it runs: it looks for a GPU when it is imported

    q, k, v = (side[0].transpose(0, 1).contiguous() for side in (query, key, value))
    queries, keys = segments
    options: dict[str, Any] = {"window_size": (-1, 0)} if causal else {}
    output = varlen_attn(q, k, v, queries.offsets, keys.offsets, queries.longest, keys.longest, **options)
    assert isinstance(output, Tensor)
    return output.transpose(0, 1)[None]
