"""Work done in background threads, or at once by whoever asks for it, behind one interface."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Pool(Protocol):
    """What a loader needs of an executor."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has `work` done, now or later; what it raises is raised by the future's result."""
        ...

    def close(self) -> None:
        """Gives up what is not begun, and waits for what is."""
        ...


class Threads:
    """Runs work in background threads, first come first served."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues the work."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Gives up what is not begun, and waits for what is."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Caller:
    """The same, without threads: work is done at once by whoever submits it."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Does the work."""
        future: Future[T] = Future()
        try:
            future.set_result(work())
        except Exception as fault:
            future.set_exception(fault)
        return future

    def close(self) -> None:
        """Nothing is under way."""
