"""`BlockLoader`: an endless stream of training steps whose whole state is a position.

Background work is done by threads, never by processes: numpy lets go of the interpreter lock where time is spent,
nothing is pickled or forked, and a killed trainer leaves nothing behind. One thread reads and plans the next window
while the present one is trained on; `workers` threads make batches ahead, which are handed out in order. At most two
windows are in memory: 2 windows x tokens x 2 bytes, so 200 MB for a million pairs of 25 + 25 tokens.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, TypeVar

from data_pipeline.api import Batch, DataConfig, Position, StepBatches
from data_pipeline.errors import InputError
from data_pipeline.shards import ShardReader
from data_pipeline.window import Window, WindowSource

T = TypeVar("T")

STEPS_AHEAD = 4
"""Steps that each worker may be ahead of training: enough to ride out a slow one, at most a few megabytes each."""


class _Pool(Protocol):
    """What the loader needs of an executor."""

    def submit(self, work: Callable[[], T]) -> Future[T]: ...

    def close(self) -> None: ...


class _Threads:
    """Runs work in background threads, first come first served."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Caller:
    """The same, without threads: work is done at once by whoever submits it."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as fault:
            future.set_exception(fault)
        return future

    def close(self) -> None:
        return None


class BlockLoader:
    """The training split as steps for one data-parallel rank: a `StatefulLoader`.

    Steps are a pure function of (shards, configuration, seed, position): rank and dp only choose which of a step's
    micro-batches this rank is given, workers only who makes them.
    """

    def __init__(
        self, reader: ShardReader, config: DataConfig, seed: int, rank: int, dp: int, start: Position | None = None
    ) -> None:
        """reader: the training split; seed: of the data order; rank of dp data-parallel ranks; start: the first step.

        Raises InputError if no pair fits the budget, for a `start` that these data do not have, and for damaged shards.
        """
        if not 0 <= rank < dp:
            raise ValueError(f"expected a rank from 0 to {dp - 1}, found {rank}")
        self._source = WindowSource(reader, config, seed)
        self._rank, self._dp = rank, dp
        self._ahead = STEPS_AHEAD * config.workers or 1
        self._prefetch = config.workers > 0
        self._makers: _Pool = _Threads(config.workers, "batches") if config.workers else _Caller()
        self._planner: _Pool = _Threads(1, "window") if config.workers else _Caller()
        self._pending: deque[tuple[Window, Future[StepBatches]]] = deque()
        self._following: Future[Window] | None = None
        self._abandon = threading.Event()
        self._closed = False
        try:
            self.seek(start if start is not None else Position())
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> Position:
        """Where the next step starts: the whole state."""
        return self._position

    @property
    def budget(self) -> int:
        """Padded tokens that a micro-batch may have a side."""
        return self._source.budget

    @property
    def left_out(self) -> int:
        """Pairs of the whole split that no step holds, because one side is longer than the budget."""
        return self._source.left_out

    @property
    def longest(self) -> int:
        """Tokens of the longest side of any pair that is trained on, EOS included."""
        return self._source.longest

    def next_step(self) -> StepBatches:
        """The micro-batches of the next step for this rank. Raises what making them has met, in whichever thread."""
        if self._closed:
            raise RuntimeError("the loader is closed")
        self._make_ahead()
        window, future = self._pending[0]
        step = future.result()
        self._pending.popleft()
        self._position = step.next_position
        if self._prefetch and self._following is None and window is self._window:
            # Only now: before, the window of the steps just handed out would still be in memory as a third one.
            self._following = self._load_following()
        return step

    def seek(self, position: Position) -> None:
        """Continues at `position`: reads and plans one window, replays nothing. Raises InputError."""
        self._drop()
        if min(position.epoch, position.window, position.step) < 0 or position.window >= self._source.windows:
            raise self._no_such(position, f"an epoch has {self._source.windows} windows")
        window = self._source.load(position.epoch, position.window)
        if position.step and position.step >= window.plan.steps:
            raise self._no_such(position, f"that window has {window.plan.steps} steps")
        self._window, self._step = window, position.step
        self._position = position

    def largest_batches(self) -> list[Batch]:
        """The two micro-batches that ask most of a device (see `WindowSource.largest_batches`)."""
        return self._source.largest_batches()

    def close(self) -> None:
        """Stops the background threads and waits for them; the loader gives no more steps."""
        self._closed = True
        self._drop()
        self._makers.close()
        self._planner.close()

    def __enter__(self) -> "BlockLoader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_ahead(self) -> None:
        while len(self._pending) < self._ahead:
            if self._step < self._window.plan.steps:
                self._pending.append((self._window, self._submit(self._window, self._step)))
                self._step += 1
                continue
            if self._following is None:
                self._following = self._load_following()
            if self._pending and (not self._following.done() or self._following.exception() is not None):
                # Steps are left to hand out: no reason to wait yet, nor to fail before the step that cannot be had.
                return
            self._window, self._step = self._following.result(), 0
            self._following = None

    def _submit(self, window: Window, step: int) -> Future[StepBatches]:
        return self._makers.submit(
            lambda: StepBatches(
                micro_batches=window.micro_batches(step, self._rank, self._dp),
                epoch=window.epoch,
                next_position=self._source.after(window, step),
            )
        )

    def _load_following(self) -> Future[Window]:
        position = self._source.after(self._window, self._window.plan.steps)
        abandoned = self._abandon
        return self._planner.submit(lambda: self._source.load(position.epoch, position.window, abandoned.is_set))

    def _drop(self) -> None:
        self._abandon.set()
        self._abandon = threading.Event()
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()
        self._following = None

    def _no_such(self, position: Position, found: str) -> InputError:
        return InputError(
            f"expected data at {position}, but {found} in {self._source.reader.folder}: the position was recorded with "
            "other shards or settings"
        )
