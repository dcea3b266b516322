"""A window in memory: the ids of its pairs in two flat arrays for each lane, and their plan; batches are cut from it.

B sentences in a micro-batch, S padded source length, T padded target length.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import BOS, EOS, PAD, UNK, Batch, DataConfig, Unreadable, zero_weight_batch
from data_pipeline.errors import ConfigError, DamagedError, InputError, StoppedError, shown
from data_pipeline.lanes import lanes_filled
from data_pipeline.plan import Cuts, Plan, Rows, cut_window, largest_micro_batch, window_blocks
from data_pipeline.ragged import Integers, positions_of, smallest_unsigned, starts_of
from data_pipeline.shards import ShardReader

NOTHING: Rows = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Part:
    """A prepared split as it takes part in training: alone, or as one corpus of a mixture.

    tag: ids that are put in front of every source; number: of the corpus in the mixture; first_id: added to the
    position of a pair in its split, so that no two corpora share a pair id.
    """

    reader: ShardReader
    name: str = ""
    tag: tuple[int, ...] = ()
    number: int = 0
    first_id: int = 0

    def tokens(self, pairs: slice | Rows = slice(None)) -> tuple[Rows, Rows]:
        """(source, target) lengths of some pairs of the split (default all) as they are trained on, tag and EOS too."""
        lengths = self.reader.lengths[pairs]
        return (
            lengths[:, 0].astype(np.int64) + len(self.tag) + 1,
            lengths[:, 1].astype(np.int64) + 1,
        )


@dataclass(frozen=True)
class Side:
    """One side of a run of pairs: pair i is the prefix and flat[starts[i] : starts[i] + lengths[i]], without EOS."""

    flat: Integers
    starts: Rows
    lengths: Integers
    prefix: Rows

    def tokens(self, rows: Rows) -> Rows:
        """Tokens of some pairs, prefix and EOS included."""
        return self.lengths[rows].astype(np.int64) + len(self.prefix) + 1

    def padded(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(prefix ids EOS PAD... [B, longest], where prefix and ids stand [B, longest]) of some pairs."""
        tokens, before = self.tokens(rows), len(self.prefix)
        width = int(tokens.max())
        inside = np.arange(width) < tokens[:, None] - 1
        ids = np.full((len(rows), width), PAD, dtype=np.int64)
        ids[:, :before] = self.prefix
        ids[:, before:][inside[:, before:]] = self.flat[positions_of(self.starts[rows], self.lengths[rows])]
        ids[np.arange(len(rows)), tokens - 1] = EOS
        return ids, inside


@dataclass(frozen=True)
class Pairs:
    """Pairs in memory. ids [N]: position of each in the prepared data; corpus: their corpus' number in the mixture;
    unreadable: the blocks among them whose ids could not be read, and are unknown tokens here."""

    source: Side
    target: Side
    ids: Rows
    corpus: int
    unreadable: tuple[Unreadable, ...] = ()

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
            source_lengths=self.source.tokens(rows),
            target_lengths=self.target.tokens(rows),
            pair_ids=self.ids[rows],
            index=index,
            corpus=self.corpus,
        )


def pairs_of(reader: ShardReader, blocks: Rows) -> Rows:
    """Positions in the split of all pairs of these blocks."""
    starts = reader.block_starts
    return np.concatenate([NOTHING, *(np.arange(starts[b], starts[b + 1]) for b in blocks)])


def read_blocks(
    part: Part, blocks: Rows, stop: Callable[[], bool] = lambda: False, skip_damaged: bool = False
) -> Pairs:
    """Reads whole blocks into one flat array a side: two bytes a token.

    stop: asked before each block; once it says True, StoppedError is raised. skip_damaged: damaged blocks are noted.
    Raises InputError for those that are not skipped.
    """
    reader = part.reader
    ids = pairs_of(reader, blocks)
    lengths = reader.lengths[ids]
    starts = (starts_of(lengths[:, 0]), starts_of(lengths[:, 1]))
    dtype = smallest_unsigned(reader.index.vocab_size - 1)

    flats: list[Integers] = [np.empty(int(side[-1]), dtype=dtype) for side in starts]
    ends = np.cumsum(reader.block_pairs[blocks])
    unreadable: list[Unreadable] = []
    for number, end in zip(blocks.tolist(), ends.tolist(), strict=True):
        if stop():
            raise StoppedError
        count = int(reader.block_pairs[number])
        places = [slice(int(side[end - count]), int(side[end])) for side in starts]
        try:
            block = reader.block(number, stop)
        except DamagedError as fault:
            if not skip_damaged:
                raise
            first = int(reader.block_starts[number]) + part.first_id
            unreadable.append(Unreadable(part.number, number, first, count, str(fault)))
            for flat, place in zip(flats, places, strict=True):
                flat[place] = UNK
            continue
        flats[0][places[0]], flats[1][places[1]] = block.source, block.target
    prefixes = (np.array(part.tag, dtype=np.int64), NOTHING)
    source, target = (Side(flats[i], starts[i][:-1], lengths[:, i], prefixes[i]) for i in (0, 1))
    return Pairs(source, target, ids + part.first_id, part.number, tuple(unreadable))


@dataclass(frozen=True)
class Lane:
    """One lane of a window: its pairs and their plan, which has M / L micro-batches for each step."""

    pairs: Pairs
    plan: Plan


@dataclass(frozen=True)
class Window:
    """Window `number` of an epoch: those of its lanes that this rank serves.

    micro_batches: how many every lane gives, also those that are not here: lanes of a window end together.
    """

    epoch: int
    number: int
    micro_batches: int
    lanes: Mapping[int, Lane]

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """Blocks of these lanes that could not be read."""
        return tuple(block for lane in self.lanes.values() for block in lane.pairs.unreadable)

    @property
    def padding(self) -> float:
        """Share of all cells of these lanes that hold no token."""
        tokens = sum(sum(lane.plan.tokens) for lane in self.lanes.values())
        return 1.0 - tokens / max(1, sum(int(lane.plan.cells.sum()) for lane in self.lanes.values()))

    @property
    def fill(self) -> float:
        """Real tokens of the larger side of each lane over the budget of all its micro-batches; mean of the lanes."""
        return sum(lane.plan.fill for lane in self.lanes.values()) / max(1, len(self.lanes))

    def batch(self, lane: int, number: int, index: int) -> Batch:
        """Micro-batch `number` of a lane, as micro-batch `index` of a step."""
        here = self.lanes[lane]
        return here.pairs.batch(here.plan.piece(number), index)


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
    if config.micro_batches % config.lanes:
        raise ConfigError(
            f"data.lanes is {config.lanes}: expected a divisor of data.micro_batches={config.micro_batches}"
        )
    return budget


class WindowSource:
    """A corpus as windows: each a pure function of (shards, configuration, seed, epoch, number).

    lanes: that its blocks are dealt to (data.lanes, or fewer if it has fewer blocks). per_step: a lane's micro-batches
    are a multiple of this. budget: padded tokens of a micro-batch, a side. left_out: pairs of the whole split that no
    window's plan holds, because one side is longer than the budget. longest: tokens of the longest side of any pair
    that is trained on, EOS included. windows: how many an epoch has.
    """

    def __init__(self, part: Part, config: DataConfig, seed: int, mixed: bool = False) -> None:
        """mixed: the corpus gives steps some of their micro-batches only, so its windows need no whole steps.

        Raises ConfigError, and InputError if no pair fits the budget.
        """
        self.part = part
        self.budget = micro_batch_budget(config)
        self.lanes = lanes_filled(config.lanes, part.reader.blocks)
        self.per_step = 1 if mixed else config.micro_batches // self.lanes
        self._window_pairs = config.window_pairs
        self._seed = seed
        self._skip_damaged = config.on_error == "skip"
        longer = np.maximum(*part.tokens())
        fits = longer <= self.budget
        self.left_out = len(fits) - int(np.count_nonzero(fits))
        if self.left_out == len(fits):
            raise InputError(
                f"no pair of {part.reader.folder} fits into a micro-batch of data.batch_tokens / data.micro_batches = "
                f"{self.budget} tokens (the shortest needs {int(longer.min())}): raise data.batch_tokens"
            )
        self.longest = int(longer[fits].max())
        self.windows = len(self._blocks(0))

    def _blocks(self, epoch: int) -> list[list[Rows]]:
        return window_blocks(self.part.reader.block_pairs, self._window_pairs, self.lanes, self._seed, epoch)

    def load(
        self, epoch: int, number: int, served: Collection[int], stop: Callable[[], bool] = lambda: False
    ) -> Window:
        """Plans a window and reads the lanes in `served`. Of the others only lengths are looked at: how many steps the
        window has is decided by the lane that needs most.

        Raises InputError for damaged shards that are not to be skipped, StoppedError once stop() says True.
        """
        blocks = self._blocks(epoch)[number]
        cuts: dict[int, Cuts] = {}
        steps = 0
        for lane in range(self.lanes):
            if stop():
                raise StoppedError
            sides = self.part.tokens(pairs_of(self.part.reader, blocks[lane]))
            key = (self._seed, epoch, number, lane) if lane else (self._seed, epoch, number)
            cut = cut_window(*sides, self.budget, key)
            steps = max(steps, cut.steps(self.per_step))
            if lane in served:
                cuts[lane] = cut
        lanes = {
            lane: Lane(read_blocks(self.part, blocks[lane], stop, self._skip_damaged), cut.plan(self.per_step, steps))
            for lane, cut in cuts.items()
        }
        return Window(epoch, number, steps * self.per_step, lanes)

    def after(self, epoch: int, number: int) -> tuple[int, int]:
        """(epoch, number) of the next window."""
        return (epoch, number + 1) if number + 1 < self.windows else (epoch + 1, 0)

    def largest_batches(self) -> tuple[Batch, Batch]:
        """The micro-batches that ask most of a device: one with as many cells as any micro-batch of any window and
        epoch can have (activations and logits), and one of the longest pairs (attention). For dry runs.

        Both are made of pairs of the whole split, chosen by length alone; only the blocks that hold them are read.
        """
        fullest = largest_micro_batch(*self.part.tokens(), self.budget)
        longer = np.maximum(*self.part.tokens())
        fits = np.flatnonzero(longer <= self.budget)
        longest = fits[np.argsort(-longer[fits], kind="stable")][: self.budget // self.longest]
        return self._batch_of(fullest, 0), self._batch_of(longest, 1)

    def _batch_of(self, pairs: Rows, index: int) -> Batch:
        blocks = np.unique(np.searchsorted(self.part.reader.block_starts, pairs, side="right") - 1)
        read = read_blocks(self.part, blocks, skip_damaged=self._skip_damaged)
        return read.batch(np.searchsorted(read.ids, pairs + self.part.first_id), index)
