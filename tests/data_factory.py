"""Small prepared data for tests: shards of random pairs, without a corpus or a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.api import SPECIAL_IDS
from data_pipeline.index import FORMAT_VERSION, Index, write_index
from data_pipeline.shards import Block, ShardReader, write_shard

VOCABULARY = 500
CHECKSUM = "c" * 64


def random_lengths(pairs: int, seed: int = 0, longest: int = 40) -> np.ndarray:
    """[pairs, 2] lengths without EOS, correlated like those of translations."""
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest + 1, size=pairs)
    target = np.clip(source + rng.integers(-3, 4, size=pairs), 1, longest)
    return np.stack((source, target), axis=1)


def make_blocks(lengths: np.ndarray, pairs_per_block: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Block]:
    """Blocks of random ids with these lengths."""
    rng = np.random.default_rng(seed)
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    blocks = []
    for first in range(0, len(lengths), pairs_per_block):
        part = lengths[first : first + pairs_per_block].astype(np.uint32)
        flats = [rng.integers(4, vocabulary, size=int(part[:, side].sum())).astype(dtype) for side in (0, 1)]
        blocks.append(Block(flats[0], part[:, 0], flats[1], part[:, 1]))
    return blocks


def write_split(
    folder: Path,
    lengths: np.ndarray,
    pairs_per_block: int = 64,
    blocks_per_shard: int = 4,
    split: str = "train",
    vocabulary: int = VOCABULARY,
) -> Index:
    """Writes shards and index of a split under `folder`/`split`."""
    target = folder / split
    target.mkdir(parents=True)
    blocks = make_blocks(lengths, pairs_per_block, vocabulary=vocabulary)
    firsts: Sequence[int] = range(0, len(blocks), blocks_per_shard)
    shards = tuple(
        write_shard(target, split, number, first, blocks[first : first + blocks_per_shard])
        for number, first in enumerate(firsts)
    )
    index = Index(FORMAT_VERSION, CHECKSUM, vocabulary, dict(SPECIAL_IDS), "f" * 64, split, shards)
    write_index(target, index)
    return index


def make_uneven_reader(
    folder: Path, lengths: np.ndarray, shard_pairs: Sequence[int], pairs_per_block: int
) -> ShardReader:
    """A reader of freshly written shards that hold shard_pairs pairs, each with a last block of its own."""
    target = folder / "train"
    target.mkdir(parents=True)
    first, shards = 0, []
    for number, (start, pairs) in enumerate(zip(np.cumsum([0, *shard_pairs]), shard_pairs, strict=False)):
        blocks = make_blocks(lengths[start : start + pairs], pairs_per_block, seed=number)
        shards.append(write_shard(target, "train", number, first, blocks))
        first += len(blocks)
    index = Index(FORMAT_VERSION, CHECKSUM, VOCABULARY, dict(SPECIAL_IDS), "f" * 64, "train", tuple(shards))
    write_index(target, index)
    return ShardReader(target, index, CHECKSUM)


def make_reader(folder: Path, lengths: np.ndarray, **layout: int) -> ShardReader:
    """A reader of freshly written shards."""
    index = write_split(folder, lengths, **layout)
    return ShardReader(folder / "train", index, CHECKSUM)
