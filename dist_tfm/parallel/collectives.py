"""Groups of processes as objects that are passed by hand, with a twin for one process.

Everything that ranks tell each other outside the training step goes through `Group`: numbers as tensors, records as
JSON. Nothing is pickled. A group talks over the CPU (gloo), also where the model trains on a GPU.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from dist_tfm.errors import DistTfmError, RunError, describe_os_error

T = TypeVar("T")
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


class Group(Protocol):
    """A set of processes; every method is collective: all of them call it, in the same order."""

    rank: int
    size: int

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums over all ranks, in 64-bit integers (wrapping)."""
        ...

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks, in double precision."""
        ...

    def gather(self, record: Json) -> list[Json]:
        """Every rank's record, in rank order, on every rank."""
        ...

    def broadcast(self, record: Json) -> Json:
        """Rank 0's record, on every rank."""
        ...

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        ...


class SingleProcess:
    """The group of one process: the same interface, no communication."""

    rank = 0
    size = 1

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, record: Json) -> list[Json]:
        return [record]

    def broadcast(self, record: Json) -> Json:
        return record

    def barrier(self) -> None:
        return None


class ProcessGroup:
    """A group over a torch.distributed (gloo) process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(tensor, group=self._group)
        return [int(v) for v in tensor]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return [float(v) for v in tensor]

    def gather(self, record: Json) -> list[Json]:
        data = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = data.numel()
        dist.all_reduce(sizes, group=self._group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        texts = (bytes(part[: int(n)].tolist()).decode() for part, n in zip(parts, sizes, strict=True))
        return [cast(Json, json.loads(text)) for text in texts]

    def broadcast(self, record: Json) -> Json:
        return self.gather(record if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        dist.barrier(group=self._group)


def together(group: Group, doing: str, work: Callable[[], T]) -> T:
    """Runs `work` on every rank; if it fails on any, every rank raises: the failing rank its own error, the others
    the same sentence with that rank's number and exit code. So no rank waits for one that has left.

    `work` itself must not communicate. `doing` completes "failed while ...".
    """
    result: T | None = None
    error: DistTfmError | None = None
    try:
        result = work()
    except DistTfmError as fault:
        error = fault
    except OSError as fault:
        error = describe_os_error(fault, doing)
        error.__cause__ = fault
    except Exception as fault:
        error = RunError(f"failed while {doing}: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
    reports = group.gather(None if error is None else {"message": str(error), "exit_code": error.exit_code})
    if all(report is None for report in reports):
        return cast(T, result)
    rank, report = next((r, report) for r, report in enumerate(reports) if isinstance(report, dict))
    if error is None or group.rank != rank:
        error = RunError(f"rank {rank}: {report['message']}")
        error.exit_code = int(cast(int, report["exit_code"]))
    error.shared = True
    raise error


def first_rank_alone(
    group: Group,
    doing: str,
    work: Callable[[], None],
    stop: Callable[[], bool] | None = None,
    heartbeat: float = 2.0,
) -> bool:
    """Rank 0 does `work`, which may take hours; the others wait, in small steps, so that no collective times out.

    False if `stop` came true on any rank before the work was done: rank 0's thread is still at it then, and the caller
    must end the process. If the work fails, every rank raises.
    """
    if group.size == 1 and stop is None:
        work()
        return True
    future: Future[None] = Future()
    if group.rank == 0:
        Thread(target=_fulfil, args=(future, work), name="rank-0-work", daemon=stop is not None).start()
    while True:
        if group.rank == 0:
            wait([future], timeout=heartbeat)
        done, stops = group.sum_ints([int(future.done()), int(stop is not None and stop())])
        if done:
            break
        if stops:
            return False
    together(group, doing, future.result if group.rank == 0 else lambda: None)
    return True


def _fulfil(future: "Future[None]", work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as fault:  # as executors do: a future that never ends would hang who waits for it
        future.set_exception(fault)
    else:
        future.set_result(None)
