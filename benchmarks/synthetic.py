"""Shards of random ids with given lengths: as large a data set as a benchmark needs, from nothing but length pairs."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import SPECIAL_IDS, UNK
from data_pipeline.index import FORMAT_VERSION, Index, write_index
from data_pipeline.plan import Lengths
from data_pipeline.ragged import Integers, smallest_unsigned
from data_pipeline.shards import Block, ShardReader, write_shard

VOCABULARY = 32_000
PAIRS_PER_BLOCK = 4096
BLOCKS_PER_SHARD = 64


def draw_lengths(lengths: Lengths, pairs: int, seed: int) -> NDArray[np.int64]:
    """[pairs, 2]: length pairs drawn, with replacement, from those of a real corpus ([N, 2], without EOS)."""
    rows = np.random.default_rng(seed).integers(0, len(lengths), pairs)
    return lengths[rows].astype(np.int64)


def write_random_shards(folder: Path, lengths: NDArray[np.int64], seed: int) -> ShardReader:
    """Writes shards of pairs with these lengths [N, 2] into `folder` and opens them. Raises OSError."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    starts = range(0, len(lengths), PAIRS_PER_BLOCK * BLOCKS_PER_SHARD)
    shards = tuple(
        write_shard(
            folder,
            folder.name,
            number,
            number * BLOCKS_PER_SHARD,
            _random_blocks(lengths[first : first + PAIRS_PER_BLOCK * BLOCKS_PER_SHARD], rng),
        )
        for number, first in enumerate(starts)
    )
    checksum = hashlib.sha256(f"random ids, seed {seed}".encode()).hexdigest()
    index = Index(FORMAT_VERSION, checksum, VOCABULARY, dict(SPECIAL_IDS), checksum, folder.name, shards)
    write_index(folder, index)
    return ShardReader(folder, index)


def _random_blocks(lengths: NDArray[np.int64], rng: np.random.Generator) -> Iterator[Block]:
    for first in range(0, len(lengths), PAIRS_PER_BLOCK):
        sides: list[Integers] = []
        for column in lengths[first : first + PAIRS_PER_BLOCK].T:
            ids = rng.integers(UNK + 1, VOCABULARY, int(column.sum()), dtype=smallest_unsigned(VOCABULARY - 1))
            sides += [ids, column]
        yield Block(*sides)
