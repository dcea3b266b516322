"""Ragged rows in one flat array: row i is flat[starts[i] : starts[i] + lengths[i]]. No loop over rows."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]


def starts_of(lengths: Integers) -> NDArray[np.int64]:
    """[N + 1]: where each row starts when rows of these lengths follow one another; the last entry is the total."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


def positions_of(starts: Integers, lengths: Integers) -> NDArray[np.int64]:
    """Positions in the flat array of all elements of the rows, row after row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    shift = np.asarray(starts, dtype=np.int64) - (ends - lengths)
    return np.repeat(shift, lengths) + np.arange(total, dtype=np.int64)


def smallest_unsigned(largest: int) -> np.dtype[np.unsignedinteger[Any]]:
    """uint8, uint16 or uint32: the smallest that holds `largest`."""
    return np.dtype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)


def flatten(ids: Sequence[Sequence[int]], dtype: np.dtype[np.unsignedinteger[Any]]) -> tuple[Integers, Integers]:
    """(flat ids, lengths) of ragged lists."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    flat: Integers = np.fromiter(chain.from_iterable(ids), dtype=dtype, count=int(lengths.sum()))
    return flat, lengths.astype(smallest_unsigned(int(lengths.max(initial=0))))
