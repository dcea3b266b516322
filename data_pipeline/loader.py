"""Endless streams of training steps whose whole state is a position: `BlockLoader` of one corpus, `MixtureLoader` of
several.

Background work is done by threads, never by processes: numpy lets go of the interpreter lock where time is spent,
nothing is pickled or forked, and a killed trainer leaves nothing behind. One thread reads and plans the next window
while the present one is trained on; `workers` threads make batches ahead, which are handed out in order. At most two
windows of a corpus are in memory (docs/data.md says how large they are).
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Protocol, TypeVar

from data_pipeline.api import (
    Batch,
    CorpusPosition,
    DataConfig,
    LostBlock,
    Position,
    StepBatches,
    Unreadable,
    zero_weight_batch,
)
from data_pipeline.background import Caller, Pool, Threads
from data_pipeline.cells import Part
from data_pipeline.errors import InputError
from data_pipeline.lanes import lanes_read_once, lanes_served, times_read
from data_pipeline.mixture import Draw
from data_pipeline.shards import ShardReader
from data_pipeline.stream import Stream
from data_pipeline.unreadable import Damage, leave_out
from data_pipeline.window import Window, WindowSource

L = TypeVar("L", bound="StepLoader")

STEPS_AHEAD = 4
"""Steps that each worker may be ahead of training: enough to ride out a slow one, at most a few megabytes each."""


class Order(Protocol):
    """Which corpus each micro-batch of a step comes from, and how the streams' positions are written down."""

    def corpora(self, step: int) -> Sequence[int]:
        """[M]: the corpus of each micro-batch; step counts all steps since training began (where that matters)."""
        ...

    def position(self, step: int, streams: Sequence[Stream]) -> Position:
        """The position of these streams before `step`."""
        ...

    def places(self, position: Position, streams: Sequence[Stream]) -> tuple[int, list[CorpusPosition]]:
        """(step, place of each stream) that `position` has written down. Raises InputError."""
        ...


class OneCorpus:
    """The order of a single corpus: each step takes M / L micro-batches of every lane, so lanes never part."""

    def __init__(self, micro_batches: int) -> None:
        self._corpora = [0] * micro_batches

    def corpora(self, step: int) -> Sequence[int]:
        """Always the same corpus."""
        return self._corpora

    def position(self, step: int, streams: Sequence[Stream]) -> Position:
        """(epoch, window, step of the window)."""
        (stream,) = streams
        place = stream.position
        return Position(place.epoch, place.window, place.taken[0] // stream.source.per_step)

    def places(self, position: Position, streams: Sequence[Stream]) -> tuple[int, list[CorpusPosition]]:
        """Every lane at the same step."""
        (stream,) = streams
        if position.corpora:
            raise InputError(
                f"expected the position of one corpus, found that of {len(position.corpora)}: it was recorded with "
                "other settings of data.corpora"
            )
        taken = (position.step * stream.source.per_step,) * stream.source.lanes
        return 0, [CorpusPosition(position.epoch, position.window, taken)]


class MixtureOrder:
    """The order of a mixture: every micro-batch's corpus is drawn by its place alone (see `mixture.Draw`)."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def corpora(self, step: int) -> Sequence[int]:
        """The corpora that are drawn for a step."""
        return self._draw.corpora(step)

    def position(self, step: int, streams: Sequence[Stream]) -> Position:
        """All steps so far, and the position of each corpus."""
        places = tuple(stream.position for stream in streams)
        return Position(min(place.epoch for place in places), 0, step, places)

    def places(self, position: Position, streams: Sequence[Stream]) -> tuple[int, list[CorpusPosition]]:
        """What `position` wrote; the start of every corpus, if it is that of a new run."""
        if position == Position():
            return 0, [CorpusPosition(0, 0, (0,) * stream.source.lanes) for stream in streams]
        if len(position.corpora) != len(streams) or position.step < 0:
            raise InputError(
                f"expected the positions of {len(streams)} corpora, found {len(position.corpora)}: the position was "
                "recorded with other settings of data.corpora"
            )
        return position.step, list(position.corpora)


class _Slot(NamedTuple):
    """Micro-batch `place` of a step: micro-batch `number` of a lane of a window."""

    place: int
    window: Window
    lane: int
    number: int


class _Pending(NamedTuple):
    """A step that is being made. oldest: running number of the first window of each stream that it may need;
    unreadable: blocks of the windows that it takes pairs from, on whichever rank."""

    oldest: list[int]
    batches: Future[StepBatches]
    unreadable: frozenset[Unreadable]


class StepLoader:
    """Steps for one data-parallel rank: a `StatefulLoader`, whatever the order of its corpora.

    Steps are a pure function of (shards, configuration, seed, position): rank and dp only choose which of a step's
    micro-batches this rank is given, workers only who makes them.
    """

    def __init__(
        self, sources: Sequence[WindowSource], order: Order, config: DataConfig, rank: int, dp: int, start: Position
    ) -> None:
        """rank of dp data-parallel ranks; start: the first step.

        Raises InputError for a `start` that these data do not have, and for damaged shards.
        """
        if not 0 <= rank < dp:
            raise ValueError(f"expected a rank from 0 to {dp - 1}, found {rank}")
        self._sources, self._order = sources, order
        self._micro_batches = config.micro_batches
        self._rank, self._dp = rank, dp
        self._ahead = STEPS_AHEAD * config.workers or 1
        self._prefetch = config.workers > 0
        self._makers: Pool = Threads(config.workers, "batches") if config.workers else Caller()
        self._planner: Pool = Threads(1, "window") if config.workers else Caller()
        self._streams = [
            Stream(source, lanes_served(rank, dp, config.micro_batches, source.lanes), self._planner)
            for source in sources
        ]
        pairs = sum(int(source.part.reader.block_starts[-1]) for source in sources)
        self._damage = Damage(pairs, config.most_skipped)
        self._pending: deque[_Pending] = deque()
        self._closed = False
        try:
            self.seek(start)
        except BaseException:  # Ctrl-C too: threads must not outlive a loader that nobody gets
            self.close()
            raise

    @property
    def position(self) -> Position:
        """Where the next step starts: the whole state."""
        return self._position

    @property
    def budget(self) -> int:
        """Padded tokens that a micro-batch may have a side."""
        return self._sources[0].budget

    @property
    def left_out(self) -> int:
        """Pairs of all corpora that no step holds, because one side is longer than the budget."""
        return sum(source.left_out for source in self._sources)

    @property
    def longest(self) -> int:
        """Tokens of the longest side of any pair that is trained on, EOS included."""
        return max(source.longest for source in self._sources)

    @property
    def times_read(self) -> float:
        """How many ranks read each byte of the corpora, on average."""
        bytes_of = [sum(shard.bytes for shard in source.part.reader.index.shards) for source in self._sources]
        times = [times_read(self._dp, self._micro_batches, source.lanes) for source in self._sources]
        return sum(size * count for size, count in zip(bytes_of, times, strict=True)) / sum(bytes_of)

    @property
    def lanes_read_once(self) -> int:
        """The fewest data.lanes with which these ranks would read each byte once."""
        return lanes_read_once(self._dp, self._micro_batches)

    def next_step(self) -> StepBatches:
        """The micro-batches of the next step for this rank. Raises what making them has met, in whichever thread."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        self._make_ahead()
        step = self._pending[0].batches.result()
        found = self._pending[0].unreadable
        damage = self._damage + found
        news = sorted(damage.found - self._damage.found, key=lambda block: (block.corpus, block.block))
        step = replace(self._without(step, damage), unreadable=tuple(news))
        self._damage = damage
        self._pending.popleft()
        self._position = step.next_position
        if self._prefetch:
            oldest = self._pending[0].oldest if self._pending else [stream.oldest for stream in self._streams]
            for stream, first in zip(self._streams, oldest, strict=True):
                if stream.newest <= first:
                    # Only now: before, the window of the steps just handed out would still be in memory as a third one.
                    stream.request()
        return step

    def leave_out(self, step: StepBatches, blocks: Sequence[Unreadable]) -> StepBatches:
        """The step without the pairs of blocks that some rank cannot read; later steps leave them out too. Raises
        InputError if they are too many."""
        self._damage = self._damage + blocks
        return replace(self._without(step, self._damage), unreadable=())

    def count_lost(self, blocks: Sequence[LostBlock]) -> None:
        """Counts what earlier attempts of the run have left out into the share that may be (data.most_skipped)."""
        self._damage = replace(self._damage, before=tuple(blocks))

    @property
    def damage(self) -> Damage:
        """Blocks that are left out so far."""
        return self._damage

    def seek(self, position: Position) -> None:
        """Continues at `position`: reads and plans one window of each corpus, replays nothing. Raises InputError."""
        self._drop()
        self._step, places = self._order.places(position, self._streams)
        for stream, place in zip(self._streams, places, strict=True):
            stream.seek(place)
        self._position = position

    def largest_batches(self) -> list[Batch]:
        """The micro-batch of most cells and the one of the longest pairs (see `WindowSource.largest_batches`)."""
        fullest, longest = zip(*(source.largest_batches() for source in self._sources), strict=True)
        return [
            max(fullest, key=lambda batch: batch.padded_tokens),
            max(longest, key=lambda batch: max(batch.source.shape[1], batch.labels.shape[1])),
        ]

    def close(self) -> None:
        """Stops the background threads and waits for them; the loader gives no more steps."""
        self._closed = True
        self._drop()
        self._makers.close()
        self._planner.close()

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """See `StatefulLoader.stop_when`."""
        for stream in self._streams:
            stream.asked = asked

    def _make_ahead(self) -> None:
        while len(self._pending) < self._ahead:
            corpora = self._order.corpora(self._step)
            if not self._ready(corpora):
                return
            oldest, epoch = [stream.oldest for stream in self._streams], min(s.epoch for s in self._streams)
            slots, unreadable = self._take(corpora)
            self._step += 1
            following = self._order.position(self._step, self._streams)
            self._pending.append(_Pending(oldest, self._submit(slots, epoch, following), unreadable))

    def _ready(self, corpora: Sequence[int]) -> bool:
        """Waits for the windows that a step needs; False if that can be left for later."""
        for number, stream in enumerate(self._streams):
            lanes = stream.source.lanes
            counts = Counter(index % lanes for index, corpus in enumerate(corpora) if corpus == number)
            while (window := stream.lacking([counts[lane] for lane in range(lanes)])) is not None:
                if self._pending and (not window.done() or window.exception() is not None):
                    # Steps are left to hand out: no reason to wait yet, nor to fail before the step that cannot be had.
                    return False
                window.result()
        return True

    def _take(self, corpora: Sequence[int]) -> tuple[list[_Slot], frozenset[Unreadable]]:
        """Moves all streams on by a step; the micro-batches of it that are this rank's, and the blocks of its windows
        that this rank could not read."""
        slots, unreadable = list[_Slot](), frozenset[Unreadable]()
        for index, corpus in enumerate(corpora):
            lane = index % self._streams[corpus].source.lanes
            window, number = self._streams[corpus].take(lane)
            if window.unreadable:
                unreadable |= window.unreadable
            if index % self._dp == self._rank:
                slots.append(_Slot(index, window, lane, number))
        return slots, unreadable

    def _submit(self, slots: Sequence[_Slot], epoch: int, following: Position) -> Future[StepBatches]:
        # ceil(M / dp) on every rank: zero-weight ones where M ends.
        missing = -(-self._micro_batches // self._dp) - len(slots)

        def make() -> StepBatches:
            batches = [slot.window.batch(slot.lane, slot.number, slot.place) for slot in slots]
            return StepBatches([*batches, *(zero_weight_batch() for _ in range(missing))], epoch, following)

        return self._makers.submit(make)

    def _without(self, step: StepBatches, damage: Damage) -> StepBatches:
        if not damage.found:
            return step
        batches = [leave_out(batch, damage.found) for batch in step.micro_batches]
        lost = sum(len(b.pair_ids) - len(left.pair_ids) for b, left in zip(step.micro_batches, batches, strict=True))
        return replace(step, micro_batches=batches, left_out=step.left_out + lost)

    def _drop(self) -> None:
        for pending in self._pending:
            pending.batches.cancel()
        self._pending.clear()
        for stream in self._streams:
            stream.drop()


class BlockLoader(StepLoader):
    """The training split of one corpus as steps for one data-parallel rank."""

    def __init__(
        self, reader: ShardReader, config: DataConfig, seed: int, rank: int, dp: int, start: Position | None = None
    ) -> None:
        """reader: the training split; seed: of the data order; rank of dp data-parallel ranks; start: the first step.

        Raises InputError if no pair fits the budget, for a `start` that these data do not have, and for damaged shards.
        """
        source = WindowSource(Part(reader), config, seed)
        super().__init__([source], OneCorpus(config.micro_batches), config, rank, dp, start or Position())


class MixtureLoader(StepLoader):
    """The training splits of several corpora, mixed by `draw`, as steps for one data-parallel rank."""

    def __init__(
        self,
        parts: Sequence[Part],
        draw: Draw,
        config: DataConfig,
        seed: int,
        rank: int,
        dp: int,
        start: Position | None = None,
    ) -> None:
        """parts: the training split of each corpus; the rest as for `BlockLoader`, and raises the same."""
        sources = [WindowSource(part, config, seed, mixed=True) for part in parts]
        super().__init__(sources, MixtureOrder(draw), config, rank, dp, start or Position())
