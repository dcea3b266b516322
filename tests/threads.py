"""Ranks as threads of this process: the layers of several ranks, forward and backward, without starting processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from dist_tfm.parallel.axis import Axis, ProcessAxis

T = TypeVar("T")


class _Meeting:
    """Where the ranks leave their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.places: list[Tensor | None] = [None] * size


class ThreadAxis(ProcessAxis):
    """An `Axis` of threads. It counts what it is given: (operation, number of elements) in order."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, len(meeting.places)
        self.members = range(self.size)
        self.given: list[tuple[str, int]] = []

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("sum", tensor)).sum(0)

    def maximum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("maximum", tensor)).amax(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._exchange("gather", tensor)

    def _exchange(self, operation: str, tensor: Tensor) -> list[Tensor]:
        self.given.append((operation, tensor.numel()))
        self._meeting.places[self.rank] = tensor.detach().clone()
        self._meeting.barrier.wait()
        parts = [part.clone() for part in self._meeting.places if part is not None]
        self._meeting.barrier.wait()
        assert len({part.shape for part in parts}) == 1, "ranks gave tensors of different shapes"
        return parts


def on_ranks(size: int, work: Callable[[Axis], T]) -> list[T]:
    """What `work` returns on each of `size` ranks, which run at the same time. An error of any rank is raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadAxis(meeting, rank))
        except BaseException:  # whatever it was, the other ranks must not wait for this one
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
