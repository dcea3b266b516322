"""Parts: encoded pieces of the corpus, each sorted by its pairs' shuffling keys; from them shards are merged.

The global shuffle is an external sort. Every line of the corpus has a random 64-bit key that depends on (shuffle_seed,
line) alone; shard s takes the s-th range of keys, which is one contiguous slice of each sorted part. So memory holds
one shard and all keys (8 bytes a pair), the disk is read in order, and neither the number of processes nor the size of
parts changes a byte of the result. A part also holds a hash of each pair if duplicates are to be found (slices.py).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_pipeline.clean import CleaningReport
from data_pipeline.files import write_atomically
from data_pipeline.ragged import Integers, positions_of, starts_of

Keys = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


SHUFFLE, SAMPLE = 1, 2
"""What keys are drawn for: the order of pairs, the sample that the tokenizer is trained on."""


def line_keys(seed: int, purpose: int, lines: NDArray[np.int64]) -> Keys:
    """[lines]: keys of these lines: SplitMix64, a bijection, so no two lines share a key."""
    start = np.random.SeedSequence((seed & (1 << 64) - 1, purpose)).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        z = start + (lines.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


@dataclass(frozen=True)
class EncodedPairs:
    """Kept pairs of a piece of the corpus: flat ids, lengths (without EOS) and shuffling keys."""

    keys: Keys
    source: Integers
    source_lengths: Integers
    target: Integers
    target_lengths: Integers

    def take(self, rows: NDArray[np.int64]) -> "EncodedPairs":
        """Some of the pairs, in this order."""
        sides = []
        for flat, lengths in ((self.source, self.source_lengths), (self.target, self.target_lengths)):
            sides += [flat[positions_of(starts_of(lengths)[:-1][rows], lengths[rows])], lengths[rows]]
        return EncodedPairs(self.keys[rows], *sides)


_FIELDS = ("keys", "source_lengths", "target_lengths", "source", "target")
_NO_KEYS = np.zeros(0, dtype=np.uint64)


def write_part(path: Path, pairs: EncodedPairs, hashes: Keys, report: CleaningReport, tokenizer_checksum: str) -> None:
    """Writes a part: one line of JSON that describes it, then its arrays, sorted by key. Raises OSError.

    hashes [pairs]: what equal pairs have in common; empty if duplicates stay.
    """
    order = np.argsort(pairs.keys, kind="stable")
    ordered = pairs.take(order)
    arrays = {field: getattr(ordered, field) for field in _FIELDS}
    arrays["hashes"] = hashes[order] if len(hashes) else hashes
    header = {
        "tokenizer_checksum": tokenizer_checksum,
        "report": asdict(report),
        "arrays": {field: [array.dtype.str, len(array)] for field, array in arrays.items()},
    }

    def write(file: BinaryIO) -> None:
        file.write(json.dumps(header).encode() + b"\n")
        for array in arrays.values():
            file.write(array.tobytes())

    write_atomically(path, write)


class Part:
    """A part on disk: its keys in memory, its lengths and ids read slice by slice."""

    def __init__(self, path: Path, dropped: Keys = _NO_KEYS) -> None:
        """dropped: sorted keys of pairs that count as absent. Raises OSError if there is no such part."""
        self.path = path
        with open(path, "rb") as file:
            header: dict[str, Any] = json.loads(file.readline())
            position = file.tell()
        self.tokenizer_checksum: str = header["tokenizer_checksum"]
        self.report = CleaningReport(**header["report"])
        self._places: dict[str, tuple[int, np.dtype[Any], int]] = {}
        for field, (kind, count) in header["arrays"].items():
            dtype = np.dtype(kind)
            self._places[field] = (position, dtype, count)
            position += dtype.itemsize * count
        self._all_keys: Keys = self._read("keys").astype(np.uint64, copy=False)
        places = np.searchsorted(dropped, self._all_keys)
        self._stays = np.ones(len(self._all_keys), dtype=np.bool_)
        inside = places < len(dropped)
        self._stays[inside] = dropped[places[inside]] != self._all_keys[inside]

    @property
    def keys(self) -> Keys:
        """Sorted keys of the pairs that are not dropped."""
        return self._all_keys if self._stays.all() else self._all_keys[self._stays]

    def hashes(self) -> Keys:
        """[pairs]: hashes of all pairs, in the order of their keys. Read from the disk."""
        return self._read("hashes").astype(np.uint64, copy=False)

    def _read(self, field: str, first: int = 0, count: int | None = None) -> Integers:
        position, dtype, total = self._places[field]
        wanted = total - first if count is None else count
        return np.fromfile(self.path, dtype, wanted, offset=position + first * dtype.itemsize)

    def between(self, low: int, high: int) -> EncodedPairs:
        """Pairs with low <= key < high (high up to 2^64), sorted by key."""
        first = int(np.searchsorted(self._all_keys, np.uint64(low)))
        last = len(self._all_keys) if high >> 64 else int(np.searchsorted(self._all_keys, np.uint64(high)))
        sides: list[Integers] = []
        for side in ("source", "target"):
            lengths = self._read(f"{side}_lengths", 0, last)
            before = int(lengths[:first].sum(dtype=np.int64))
            kept = lengths[first:]
            sides += [self._read(side, before, int(kept.sum(dtype=np.int64))), kept]
        pairs = EncodedPairs(self._all_keys[first:last], *sides)
        stays = self._stays[first:last]
        return pairs if stays.all() else pairs.take(np.flatnonzero(stays))


def merge_slices(slices: list[EncodedPairs]) -> EncodedPairs:
    """All pairs of the slices, sorted by key."""
    joined = EncodedPairs(
        **{
            field: np.concatenate([getattr(piece, field) for piece in slices])
            for field in ("keys", "source", "source_lengths", "target", "target_lengths")
        }
    )
    return joined.take(np.argsort(joined.keys, kind="stable"))
