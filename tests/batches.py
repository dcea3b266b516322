"""Ragged micro-batches for tests: lengths from 1 to 40, one of them with 1 target token and one with 300."""

from collections.abc import Sequence

import numpy as np

from data_pipeline.api import BOS, EOS, PAD, Batch, zero_weight_batch

VOCABULARY = 100


def make_batch(generator: np.random.Generator, target_lengths: Sequence[int], index: int) -> Batch:
    """Random sentence pairs with these target lengths (EOS included); sources are of other, equally ragged lengths."""
    source_lengths = [int(n) for n in generator.integers(1, 41, len(target_lengths))]
    source, labels = (_padded(generator, lengths) for lengths in (source_lengths, target_lengths))
    begin = np.full((len(labels), 1), BOS, dtype=np.int64)
    shifted = np.concatenate([begin, np.where(labels == EOS, PAD, labels)[:, :-1]], axis=1)
    return Batch(
        source=source,
        target_in=shifted,
        labels=labels,
        source_lengths=np.array(source_lengths, dtype=np.int64),
        target_lengths=np.array(target_lengths, dtype=np.int64),
        pair_ids=np.arange(len(target_lengths), dtype=np.int64),
        index=index,
    )


def step_batches(step: int, count: int) -> list[Batch]:
    """The `count` micro-batches of a step; where there are two, one has 1 target token and another 300."""
    generator = np.random.default_rng(1000 + step)
    lengths = [[int(n) for n in generator.integers(1, 41, int(generator.integers(2, 6)))] for _ in range(count)]
    lengths[step % count] = [40, 40, 40, 40, 40, 40, 39, 21]
    if count > 1:
        lengths[(step + 1) % count] = [1]
    return [make_batch(generator, row, index) for index, row in enumerate(lengths)]


def share(batches: Sequence[Batch], rank: int, ranks: int) -> list[Batch]:
    """Micro-batches rank, rank + ranks, ..., filled up with zero-weight ones so that all ranks have equally many."""
    rounds = -(-len(batches) // ranks)
    places = (round_ * ranks + rank for round_ in range(rounds))
    return [batches[place] if place < len(batches) else zero_weight_batch() for place in places]


def target_tokens(batches: Sequence[Batch]) -> int:
    """Labels that are not pads, counted one by one."""
    return sum(int((batch.labels != PAD).sum()) for batch in batches)


def _padded(generator: np.random.Generator, lengths: Sequence[int]) -> np.ndarray:
    rows = np.full((len(lengths), max(lengths)), PAD, dtype=np.int64)
    for row, length in zip(rows, lengths, strict=True):
        row[: length - 1] = generator.integers(4, VOCABULARY, length - 1)
        row[length - 1] = EOS
    return rows
