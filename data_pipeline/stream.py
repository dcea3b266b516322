"""One corpus as an endless stream of micro-batches, lane by lane, window after window, epoch after epoch.

Every rank follows all lanes, so that all ranks know where the corpus stands; it holds the pairs of its own lanes only.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from data_pipeline.api import CorpusPosition
from data_pipeline.background import Pool
from data_pipeline.errors import InputError
from data_pipeline.window import Window, WindowSource


class Stream:
    """Where every lane of a corpus stands, and the windows from that of the slowest lane on.

    Windows are loaded by `planner`. oldest, newest: running numbers of the first and of the last loaded window.
    """

    def __init__(self, source: WindowSource, served: Collection[int], planner: Pool) -> None:
        """served: the lanes whose pairs this rank needs. `seek` comes before everything else."""
        self.source = source
        self._served = served
        self._planner = planner
        self._windows: list[Window] = []
        self._following: Future[Window] | None = None
        self._abandon = threading.Event()
        self.asked: Callable[[], bool] = lambda: False  # whether to give up what is being loaded
        self._first = (0, 0)
        self._taken = [0] * source.lanes
        self.oldest = 0

    @property
    def newest(self) -> int:
        """Running number of the last window that is loaded."""
        return self.oldest + len(self._windows) - 1

    @property
    def epoch(self) -> int:
        """The epoch that the slowest lane is in."""
        return self._first[0]

    @property
    def position(self) -> CorpusPosition:
        """Where every lane stands; windows that all lanes are through with are let go."""
        self._settle()
        return CorpusPosition(*self._first, tuple(self._taken))

    def seek(self, position: CorpusPosition) -> None:
        """Goes to a position: loads its window. Raises InputError if there is no such position."""
        self.drop()
        lanes, windows = self.source.lanes, self.source.windows
        if min(position.epoch, position.window, *position.taken) < 0 or position.window >= windows:
            raise self._no_such(position, f"an epoch has {windows} windows")
        if len(position.taken) != lanes:
            raise self._no_such(position, f"there are {lanes} lanes")
        window = self.source.load(position.epoch, position.window, self._served)
        if 0 < window.micro_batches <= min(position.taken) or (not window.micro_batches and any(position.taken)):
            raise self._no_such(position, f"a lane of that window has {window.micro_batches} micro-batches")
        self._windows = [window]
        self._first = (position.epoch, position.window)
        self._taken = list(position.taken)
        self._settle()

    def lacking(self, counts: Sequence[int]) -> Future[Window] | None:
        """The window that has to be waited for before counts[lane] more micro-batches can be taken; None if none."""
        while True:
            self._settle()
            wanted = max(taken + count for taken, count in zip(self._taken, counts, strict=True))
            if wanted <= sum(window.micro_batches for window in self._windows) and self._windows:
                return None
            following = self.request()
            if not following.done() or following.exception() is not None:
                return following
            self._windows.append(following.result())
            self._following = None

    def take(self, lane: int) -> tuple[Window, int]:
        """(window, number) of the next micro-batch of a lane, of which `lacking` has said that it is there."""
        number = self._taken[lane]
        self._taken[lane] += 1
        for window in self._windows:
            if number < window.micro_batches:
                return window, number
            number -= window.micro_batches
        raise AssertionError("taken before it was there")

    def request(self) -> Future[Window]:
        """The window after the last one, which is loaded now if it was not asked for before."""
        if self._following is None:
            last = (self._windows[-1].epoch, self._windows[-1].number) if self._windows else None
            following = self.source.after(*last) if last is not None else self._first
            dropped, asked = self._abandon.is_set, self.asked
            self._following = self._planner.submit(
                lambda: self.source.load(*following, self._served, lambda: dropped() or asked())
            )
        return self._following

    def drop(self) -> None:
        """Lets go of all windows, and of what is being loaded."""
        self._abandon.set()
        self._abandon = threading.Event()
        self._windows = []
        self._following = None

    def _settle(self) -> None:
        while self._windows and min(self._taken) >= (done := self._windows[0].micro_batches):
            self._taken = [taken - done for taken in self._taken]
            self._first = self.source.after(*self._first)
            del self._windows[0]
            self.oldest += 1

    def _no_such(self, position: CorpusPosition, found: str) -> InputError:
        return InputError(
            f"expected data at {position}, but {found} in {self.source.part.reader.folder}: the position was recorded "
            "with other shards or settings"
        )
