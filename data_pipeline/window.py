"""Windows: which blocks a window has, how its pairs are planned, and what a rank holds of it in memory."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data_pipeline.api import Batch, DataConfig, Unreadable
from data_pipeline.cells import MicroBatches, Part, lay_out, pairs_of
from data_pipeline.errors import ConfigError, InputError, StoppedError, shown
from data_pipeline.lanes import lanes_filled
from data_pipeline.plan import Cuts, Rows, cut_window, largest_micro_batch, window_blocks


@dataclass(frozen=True)
class Lane:
    """One lane of a window: its micro-batches, M / L of them for each step, and what is known of all together.

    tokens: real ones of both sides, EOS included; cells: all that are trained on, pads included; fill: real tokens of
    the larger side over the budget of all.
    """

    micro_batches: MicroBatches
    tokens: int
    cells: int
    fill: float


@dataclass(frozen=True)
class Window:
    """Window `number` of an epoch: those of its lanes that this rank serves.

    micro_batches: how many every lane gives, also those that are not here: lanes of a window end together.
    """

    epoch: int
    number: int
    micro_batches: int
    lanes: Mapping[int, Lane]

    @cached_property
    def unreadable(self) -> frozenset[Unreadable]:
        """Blocks of these lanes that could not be read."""
        return frozenset(block for lane in self.lanes.values() for block in lane.micro_batches.unreadable)

    @property
    def padding(self) -> float:
        """Share of all cells of these lanes that hold no token."""
        tokens = sum(lane.tokens for lane in self.lanes.values())
        return 1.0 - tokens / max(1, sum(lane.cells for lane in self.lanes.values()))

    @property
    def fill(self) -> float:
        """Real tokens of the larger side of each lane over the budget of all its micro-batches; mean of the lanes."""
        return sum(lane.fill for lane in self.lanes.values()) / max(1, len(self.lanes))

    def batch(self, lane: int, number: int, index: int) -> Batch:
        """Micro-batch `number` of a lane, as micro-batch `index` of a step."""
        return self.lanes[lane].micro_batches.batch(number, index)


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
            sides = self.part.tokens(blocks[lane])
            key = (self._seed, epoch, number, lane) if lane else (self._seed, epoch, number)
            cut = cut_window(*sides, self.budget, key)
            steps = max(steps, cut.steps(self.per_step))
            if lane in served:
                cuts[lane] = cut
        lanes = dict[int, Lane]()
        for lane, cut in cuts.items():
            plan = cut.plan(self.per_step, steps)
            read = lay_out(self.part, blocks[lane], plan.rows, plan.offsets, stop, self._skip_damaged)
            lanes[lane] = Lane(read, sum(plan.tokens), int(plan.cells.sum()), plan.fill)
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
        rows = np.searchsorted(pairs_of(self.part.reader, blocks), pairs)
        read = lay_out(self.part, blocks, rows, np.array([0, len(rows)]), skip_damaged=self._skip_damaged)
        return read.batch(0, index)
