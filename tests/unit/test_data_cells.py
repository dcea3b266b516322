"""Batches made by whole rows are those made pair by pair, whatever the ids, the lengths and the tag."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.api import BOS, EOS, PAD
from data_pipeline.cells import Part, lay_out
from data_pipeline.errors import StoppedError
from tests.data_factory import make_blocks, make_reader

LENGTHS = np.random.default_rng(2).integers(0, 9, (150, 2))
LENGTHS[[3, 149]] = [[40, 1], [1, 0]]  # the last pair shares its micro-batches with far longer ones
PER_BLOCK = 32
NUMBERS = np.array([4, 0, 3])
"""Blocks that are read, in another order than they are stored in, not all of them."""


def padded(rows: list[list[int]]) -> np.ndarray:
    """[B, longest]: the rows, filled up with PAD."""
    width = max(map(len, rows))
    return np.array([row + [PAD] * (width - len(row)) for row in rows], dtype=np.int64)


@pytest.mark.parametrize("tag", [(), (7,), (9, 4, 250)])
@pytest.mark.parametrize("vocabulary", [256, 500, 1 << 16, 70_000])
def test_whole_rows_are_the_pairs_one_by_one(tmp_path: Path, vocabulary: int, tag: tuple[int, ...]) -> None:
    reader = make_reader(tmp_path, LENGTHS, pairs_per_block=PER_BLOCK, vocabulary=vocabulary)
    pairs, number_of = [], []
    blocks = make_blocks(LENGTHS, PER_BLOCK, vocabulary=vocabulary)
    for number in NUMBERS.tolist():
        block = blocks[number]
        ends = [np.cumsum(lengths)[:-1] for lengths in (block.source_lengths, block.target_lengths)]
        pairs += zip(np.split(block.source, ends[0]), np.split(block.target, ends[1]), strict=True)
        number_of += range(number * PER_BLOCK, number * PER_BLOCK + block.pairs)
    rows = np.random.default_rng(5).permutation(len(pairs))[:-2]  # two pairs are in no micro-batch
    offsets = np.array([0, 1, 1, 20, 50, len(rows)])
    found = lay_out(Part(reader, tag=tag, number=2, first_id=1000), NUMBERS, rows, offsets)
    for number in (4, 0, 2, 3):  # in any order
        batch = found.batch(number, 5)
        members = rows[offsets[number] : offsets[number + 1]].tolist()
        sources = [[*tag, *pairs[row][0].tolist(), EOS] for row in members]
        targets = [pairs[row][1].tolist() for row in members]
        assert np.array_equal(batch.source, padded(sources))
        assert np.array_equal(batch.labels, padded([[*row, EOS] for row in targets]))
        assert np.array_equal(batch.target_in, padded([[BOS, *row] for row in targets]))
        assert batch.source_lengths.tolist() == [len(row) for row in sources]
        assert batch.target_lengths.tolist() == [len(row) + 1 for row in targets]
        assert batch.pair_ids.tolist() == [1000 + number_of[row] for row in members]
        assert (batch.index, batch.corpus) == (5, 2)
        arrays = (batch.source, batch.target_in, batch.labels, batch.source_lengths, batch.target_lengths)
        assert {array.dtype for array in (*arrays, batch.pair_ids)} == {np.dtype(np.int64)}
    assert found.batch(1, 0).index == -1


def test_reading_stops_between_blocks(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, LENGTHS, pairs_per_block=PER_BLOCK)
    answers = iter([False, False, True])
    with pytest.raises(StoppedError):
        lay_out(Part(reader), NUMBERS, np.arange(4), np.array([0, 4]), lambda: next(answers))
