"""Arrays of unsigned integers in .npy format 1.0, written by numpy, read without trust.

Reading takes exactly what writing makes: the header is matched as text and never evaluated, object arrays have no way
in, and what the header claims is compared with the bytes that are there before anything is made of it.
"""

import io
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.ragged import Integers

MAGIC = b"\x93NUMPY\x01\x00"
LONGEST_HEADER = (1 << 16) - 1
"""Bytes that the two-byte length field of format 1.0 allows a header."""

_PREFIX = len(MAGIC) + 2
_HEADER = re.compile(
    rb"\{'descr': '([<>|]u[124])', 'fortran_order': False, 'shape': \((\d{1,18}),(?: (\d{1,18}))?\), \} *\n"
)


def encode_npy(array: NDArray[Any]) -> bytes:
    """The array as a .npy file of format 1.0. Raises ValueError for arrays of objects."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def decode_npy(data: bytes | memoryview, dimensions: int) -> Integers:
    """The array in a .npy file: one or two `dimensions`, unsigned integers of at most 32 bits. A read-only view.

    Raises ValueError, whose message continues "member X ...", for anything else.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("is no .npy array of format 1.0")
    start = _PREFIX + int.from_bytes(data[len(MAGIC) : _PREFIX], "little")
    match = _HEADER.fullmatch(bytes(data[_PREFIX:start]))
    shape = tuple(int(size) for size in match.groups()[1:] if size is not None) if match is not None else ()
    if match is None or len(shape) != dimensions:
        kind = "a flat array" if dimensions == 1 else f"an array of {dimensions} dimensions"
        raise ValueError(f"is not {kind} of unsigned integers of at most 32 bits")
    dtype = np.dtype(match[1].decode("ascii"))
    # Python's integers: a product that wraps would pass.
    claimed, found = math.prod(shape) * dtype.itemsize, len(data) - start
    if claimed != found:
        raise ValueError(f"claims {claimed} bytes of numbers and holds {found}")
    array: Integers = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array
