"""A window in memory: the ids of all its pairs in two flat arrays, and its plan; batches are cut from it.

B sentences in a micro-batch, S padded source length, T padded target length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import BOS, EOS, PAD, Batch, DataConfig, Position, zero_weight_batch
from data_pipeline.errors import ConfigError, InputError, shown
from data_pipeline.plan import Plan, Rows, largest_micro_batch, plan_window, window_blocks
from data_pipeline.ragged import Integers, positions_of, smallest_unsigned, starts_of
from data_pipeline.shards import ShardReader


@dataclass(frozen=True)
class Side:
    """One side of a run of pairs: pair i is flat[starts[i] : starts[i] + lengths[i]], without EOS."""

    flat: Integers
    starts: Rows
    lengths: Rows

    def padded(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(ids EOS PAD... [B, longest + 1], where ids stand [B, longest + 1]) of some pairs."""
        lengths = self.lengths[rows]
        width = int(lengths.max()) + 1
        inside = np.arange(width) < lengths[:, None]
        ids = np.full((len(rows), width), PAD, dtype=np.int64)
        ids[inside] = self.flat[positions_of(self.starts[rows], lengths)]
        ids[np.arange(len(rows)), lengths] = EOS
        return ids, inside


@dataclass(frozen=True)
class Pairs:
    """Pairs in memory. ids [N]: position of each in the prepared data."""

    source: Side
    target: Side
    ids: Rows

    def batch(self, rows: Rows, index: int) -> Batch:
        """The micro-batch of these pairs (by position in this object); no pairs give a zero-weight one."""
        if not len(rows):
            return zero_weight_batch()
        source, _ = self.source.padded(rows)
        labels, inside = self.target.padded(rows)
        target_in = np.full_like(labels, PAD)
        target_in[:, 0] = BOS
        target_in[:, 1:][inside[:, :-1]] = labels[inside]
        return Batch(
            source=source,
            target_in=target_in,
            labels=labels,
            source_lengths=self.source.lengths[rows] + 1,
            target_lengths=self.target.lengths[rows] + 1,
            pair_ids=self.ids[rows],
            index=index,
        )


def read_blocks(reader: ShardReader, blocks: Rows, stop: Callable[[], bool] = lambda: False) -> Pairs:
    """Reads whole blocks into one flat array a side: two bytes a token, so 100 MB for a million pairs of 25 + 25.

    stop: asked before each block; once it says True, StoppedError is raised. Raises InputError for damaged shards.
    """
    ids = np.concatenate([np.arange(reader.block_starts[b], reader.block_starts[b + 1]) for b in blocks])
    lengths = reader.lengths[ids].astype(np.int64)
    starts = (starts_of(lengths[:, 0]), starts_of(lengths[:, 1]))
    dtype = smallest_unsigned(reader.index.vocab_size - 1)

    flats: list[Integers] = [np.empty(int(side[-1]), dtype=dtype) for side in starts]
    filled = [0, 0]
    for number in blocks:
        if stop():
            raise StoppedError
        block = reader.block(int(number))
        for side, part in enumerate((block.source, block.target)):
            flats[side][filled[side] : filled[side] + len(part)] = part
            filled[side] += len(part)
    source, target = (Side(flats[i], starts[i][:-1], lengths[:, i]) for i in (0, 1))
    return Pairs(source, target, ids)


class StoppedError(Exception):
    """Reading was given up because its loader is being closed or moved."""


@dataclass(frozen=True)
class Window:
    """Window `number` of an epoch: its pairs and its plan."""

    epoch: int
    number: int
    pairs: Pairs
    plan: Plan

    def micro_batches(self, step: int, rank: int, dp: int) -> list[Batch]:
        """Micro-batches rank, rank + dp, ... of a step: ceil(M / dp) on every rank, zero-weight ones where M ends."""
        count = self.plan.micro_batches
        return [
            self.pairs.batch(self.plan.rows_of(step, index), index) if index < count else zero_weight_batch()
            for index in range(rank, -(-count // dp) * dp, dp)
        ]


def micro_batch_budget(config: DataConfig) -> int:
    """Padded tokens that a micro-batch may have a side, EOS included: batch_tokens / M. Raises ConfigError."""
    budget = config.batch_tokens // config.micro_batches
    if budget >> 62:
        raise ConfigError(
            f"data.batch_tokens is {shown(config.batch_tokens)}: expected fewer than 2^62 in a micro-batch"
        )
    if budget < 2:
        raise ConfigError(
            f"data.batch_tokens is {config.batch_tokens} for data.micro_batches={config.micro_batches}: expected at "
            f"least {2 * config.micro_batches}, room for a token and EOS in each micro-batch"
        )
    return budget


class WindowSource:
    """The training split as windows: each a pure function of (shards, configuration, seed, epoch, number).

    budget: padded tokens of a micro-batch, a side. left_out: pairs of the whole split that no window's plan holds,
    because one side is longer than the budget. windows: how many an epoch has.
    """

    def __init__(self, reader: ShardReader, config: DataConfig, seed: int) -> None:
        """Raises ConfigError, and InputError if no pair fits the budget."""
        self.reader = reader
        self.budget = micro_batch_budget(config)
        self._config = config
        self._seed = seed
        self._longest = reader.lengths.max(axis=1).astype(np.int64) + 1
        self.left_out = int((self._longest > self.budget).sum())
        if self.left_out == len(self._longest):
            raise InputError(
                f"no pair of {reader.folder} fits into a micro-batch of data.batch_tokens / data.micro_batches = "
                f"{self.budget} tokens (the shortest needs {int(self._longest.min())}): raise data.batch_tokens"
            )
        self.windows = len(self._blocks(0))

    def _blocks(self, epoch: int) -> list[Rows]:
        return window_blocks(self.reader.block_pairs, self._config.window_pairs, self._seed, epoch)

    def load(self, epoch: int, number: int, stop: Callable[[], bool] = lambda: False) -> Window:
        """Reads and plans a window. Raises InputError for damaged shards, StoppedError once stop() says True."""
        pairs = read_blocks(self.reader, self._blocks(epoch)[number], stop)
        key = (self._seed, epoch, number)
        sides = (pairs.source.lengths + 1, pairs.target.lengths + 1)
        return Window(epoch, number, pairs, plan_window(*sides, self.budget, self._config.micro_batches, key))

    def after(self, window: Window, step: int) -> Position:
        """Where the step after `step` of a window starts."""
        if step + 1 < window.plan.steps:
            return Position(window.epoch, window.number, step + 1)
        if window.number + 1 < self.windows:
            return Position(window.epoch, window.number + 1, 0)
        return Position(window.epoch + 1, 0, 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest side of any pair that is trained on, EOS included."""
        return int(self._longest[self._longest <= self.budget].max())

    def largest_batches(self) -> list[Batch]:
        """The micro-batches that ask most of a device: one with as many cells as any micro-batch of any window and
        epoch can have (activations and logits), and one of the longest pairs (attention). For dry runs.

        Both are made of pairs of the whole split, chosen by length alone; only the blocks that hold them are read.
        """
        lengths = self.reader.lengths.astype(np.int64) + 1
        fullest = largest_micro_batch(lengths[:, 0], lengths[:, 1], self.budget)
        fits = np.flatnonzero(self._longest <= self.budget)
        ranked = fits[np.argsort(-self._longest[fits], kind="stable")]
        longest = ranked[: self.budget // int(self._longest[ranked[0]])]
        return [self._batch_of(fullest, 0), self._batch_of(longest, 1)]

    def _batch_of(self, ids: Rows, index: int) -> Batch:
        blocks = np.unique(np.searchsorted(self.reader.block_starts, ids, side="right") - 1)
        pairs = read_blocks(self.reader, blocks)
        return pairs.batch(np.searchsorted(pairs.ids, ids), index)
