"""When a rank talks to the others: every collective of torch.distributed and every exchange of a pipeline.

The clock is time.perf_counter, which on Linux is one for all processes of a machine: so what a rank spends in a message
can be told apart into waiting for the other end and the message itself.
"""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from dist_tfm.errors import RunError
from dist_tfm.parallel.links import Message, ProcessLinks
from dist_tfm.parallel.pipeline import Pipeline

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
)


class Event(NamedTuple):
    """A time spent in communication. keys: what was sent or received, each in an order that both ends keep."""

    keys: tuple[str, ...]
    entry: float
    exit: float


class Record(NamedTuple):
    """One step of one rank. passes: from the beginning to the end of a pipeline's passes, if it has any."""

    entry: float
    exit: float
    loss: float
    events: Sequence[Event]
    passes: tuple[float, float] | None


class Parts(NamedTuple):
    """Seconds of a step, the mean over its ranks; they add up to the time from the first rank's start to the last one's
    end. waiting: for other ranks to begin what needs both; communication: from then on."""

    compute: float
    communication: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


class Watch:
    """Notes events of this process while it is `installed`."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._passes: tuple[float, float] | None = None

    def take(self) -> tuple[list[Event], tuple[float, float] | None]:
        """Events and passes since the last call."""
        taken = self._events, self._passes
        self._events, self._passes = [], None
        return taken

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """To be entered before an engine is built: DeepSpeed keeps some of these functions."""
        with contextlib.ExitStack() as stack:
            for name in COLLECTIVES:
                stack.enter_context(_replaced(dist, name, self._collective(name, getattr(dist, name))))
            stack.enter_context(_replaced(ProcessLinks, "exchange", self._exchange(ProcessLinks.exchange)))
            stack.enter_context(_replaced(Pipeline, "train", self._train(Pipeline.train)))
            yield

    def _collective(self, name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if dist.get_world_size(kwargs.get("group")) == 1:
                return right(*args, **kwargs)  # nobody to talk to
            if kwargs.get("async_op"):
                raise RunError(f"{name} was started without being waited for: its time cannot be told")
            return self._noted((name,), lambda: right(*args, **kwargs))

        return collective

    def _exchange(self, right: Callable[..., None]) -> Callable[..., None]:
        def exchange(links: ProcessLinks, send: Sequence[Message], receive: Sequence[Message]) -> None:
            mine = links._axis.rank
            keys = [f"{mine}>{m.stage}" for m in send] + [f"{m.stage}>{mine}" for m in receive]
            self._noted(tuple(keys), lambda: right(links, send, receive))

        return exchange

    def _train(self, right: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            entry = time.perf_counter()
            results = right(*args, **kwargs)
            self._passes = entry, time.perf_counter()
            return results

        return train

    def _noted(self, keys: tuple[str, ...], run: Callable[[], Any]) -> Any:
        entry = time.perf_counter()
        result = run()
        self._events.append(Event(keys, entry, time.perf_counter()))
        return result


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def divide_step(records: Sequence[Record]) -> Parts:
    """The parts of a step whose ranks all take part in every collective. Raises RunError where they noted other
    messages than each other."""
    return _divide(records, [(r.entry, r.exit) for r in records])


def divide_passes(records: Sequence[Record]) -> Parts:
    """The parts of a pipeline's passes alone: what comes before and after them (sums, the update) is left out."""
    spans = [record.passes for record in records if record.passes is not None]
    if len(spans) != len(records):
        raise RunError("expected the passes of a pipeline on every rank, found none")
    return _divide(records, spans)


def _divide(records: Sequence[Record], spans: Sequence[tuple[float, float]]) -> Parts:
    begin, end = min(entry for entry, _ in spans), max(end for _, end in spans)
    communication = waiting = 0.0
    for events, ready, (entry, exit_) in zip((r.events for r in records), _ready_times(records), spans, strict=True):
        waiting += (entry - begin) + (end - exit_)
        for event, both in zip(events, ready, strict=True):
            if entry <= event.entry and event.exit <= exit_:
                begun = min(max(both, event.entry), event.exit)
                waiting += begun - event.entry
                communication += event.exit - begun
    ranks, total = len(records), end - begin
    waiting, communication = waiting / ranks, communication / ranks
    return Parts(total - communication - waiting, communication, waiting)


def _ready_times(records: Sequence[Record]) -> list[list[float]]:
    """For each event of each rank when all that take part in it had begun it."""
    entries: list[dict[str, list[float]]] = []
    for record in records:
        by_key: dict[str, list[float]] = defaultdict(list)
        for event in record.events:
            for key in event.keys:
                by_key[key].append(event.entry)
        entries.append(by_key)
    counts: dict[str, set[int]] = defaultdict(set)
    for by_key in entries:
        for key, times in by_key.items():
            counts[key].add(len(times))
    if any(len(different) > 1 for different in counts.values()):
        raise RunError(f"ranks noted messages that others did not: {dict(counts)}")
    result = []
    for record in records:
        seen: Counter[str] = Counter()
        ready = []
        for event in record.events:
            ready.append(max(by_key[key][seen[key]] for key in event.keys for by_key in entries if key in by_key))
            seen.update(event.keys)
        result.append(ready)
    return result
