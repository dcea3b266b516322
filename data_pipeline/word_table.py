"""Encoding word by word: each word's ids are found once and remembered, so that a text costs a look-up a word.

For tokenizers whose ids of a text are those of its words, one after another. No loop over ids anywhere.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from data_pipeline.ragged import flatten, positions_of, starts_of

MOST_WORDS = 1 << 20
"""Words that are remembered before all are forgotten: 200 MB or so."""


class WordTable:
    """Words with their ids, learnt as they come."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], most_words: int = MOST_WORDS) -> None:
        """encode: the ids of each of some words."""
        self._encode = encode
        self._most_words = most_words
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._starts = starts_of(self._lengths)

    def encode(self, lines: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """(flat ids, lengths [lines]) of texts whose words stand between single blanks."""
        if not lines:
            return np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.int64)
        words = " ".join(lines).split(" ")
        self._learn(words)
        numbers = np.fromiter(map(self._numbers.__getitem__, words), dtype=np.int64, count=len(words))
        lengths = self._lengths[numbers]
        flat = self._ids[positions_of(self._starts[numbers], lengths)]
        # A blank line is one word without ids.
        counts = np.fromiter((line.count(" ") + 1 for line in lines), dtype=np.int64, count=len(lines))
        return flat, np.add.reduceat(lengths, starts_of(counts)[:-1])

    def _learn(self, words: list[str]) -> None:
        different = set(words)
        new = list(different.difference(self._numbers))
        if new and len(self._numbers) + len(new) > self._most_words:
            self._forget()
            new = list(different)
        if not new:
            return
        ids, lengths = flatten(self._encode(new), np.dtype(np.uint32))
        self._numbers.update(zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True))
        self._ids = np.concatenate((self._ids, ids.astype(np.uint32, copy=False)))
        self._lengths = np.concatenate((self._lengths, lengths.astype(np.int64)))
        self._starts = starts_of(self._lengths)
