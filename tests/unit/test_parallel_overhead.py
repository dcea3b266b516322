"""The benchmark of parallelism: how time is told apart, what a stage's passes cost, and that it runs to its end.

No test here looks at a time: only at what is measured, and how it is put together.
"""

import json
import multiprocessing
from pathlib import Path

import pytest

from benchmarks import parallel_overhead
from benchmarks.parallel_overhead import KINDS, QUICK
from benchmarks.stage_costs import measure_costs
from benchmarks.watching import Event, Record, divide_passes, divide_step
from dist_tfm.config.schema import Config
from dist_tfm.errors import RunError
from dist_tfm.parallel.schedule import Backward, Forward
from tests.batches import step_batches
from tests.jobs import small_project
from tests.unit.test_benchmarks import check_rows
from tests.warm import PRELOADED


def record(entry: float, exit_: float, *events: Event, passes: tuple[float, float] | None = None) -> Record:
    return Record(entry, exit_, 0.0, events, passes)


def test_waiting_for_a_collective_is_told_from_the_collective() -> None:
    # Rank 0 computes for 2 s, rank 1 for 5 s; then both sum for 1 s, and rank 1 goes on for 2 s.
    first = record(0.0, 6.0, Event(("all_reduce",), 2.0, 6.0))
    second = record(0.0, 8.0, Event(("all_reduce",), 5.0, 6.0))
    parts = divide_step([first, second])
    assert parts == pytest.approx(((2 + 5 + 2) / 2, 1.0, (3 + 2) / 2))
    assert parts.total == pytest.approx(8.0)


def test_the_two_ends_of_messages_are_found_in_their_order() -> None:
    # Two messages from 0 to 1; the second travels while one comes back.
    sender = record(0.0, 10.0, Event(("0>1",), 1.0, 2.0), Event(("0>1", "1>0"), 3.0, 9.0))
    receiver = record(0.0, 10.0, Event(("0>1",), 0.5, 2.0), Event(("1>0", "0>1"), 7.0, 9.0))
    parts = divide_step([sender, receiver])
    assert parts.communication == pytest.approx(((2 - 1) + (9 - 7) + (2 - 1) + (9 - 7)) / 2)
    assert parts.waiting == pytest.approx(((7 - 3) + (1 - 0.5)) / 2)
    assert parts.total == pytest.approx(10.0)


def test_passes_leave_out_what_comes_before_and_after_them() -> None:
    first = record(0.0, 20.0, Event(("0>1",), 4.0, 5.0), Event(("all_reduce",), 12.0, 20.0), passes=(2.0, 12.0))
    second = record(0.0, 20.0, Event(("0>1",), 3.0, 5.0), Event(("all_reduce",), 19.0, 20.0), passes=(3.0, 11.0))
    parts = divide_passes([first, second])
    assert parts.total == pytest.approx(10.0)
    assert parts.communication == pytest.approx(1.0)
    assert parts.waiting == pytest.approx(((3 - 2) + (12 - 11) + (4 - 3)) / 2)
    with pytest.raises(RunError, match="passes of a pipeline"):
        divide_passes([record(0.0, 1.0)])


def test_ranks_that_noted_different_messages_are_not_divided() -> None:
    both = Event(("all_reduce",), 0.0, 1.0)
    with pytest.raises(RunError, match="others did not"):
        divide_step([record(0.0, 2.0, both, both), record(0.0, 2.0, both)])


def test_a_stage_alone_passes_every_micro_batch() -> None:
    cost = measure_costs(Config(model=QUICK.model), QUICK.vocabulary, 3, step_batches(1, 2), rounds=1)
    assert all(cost(stage, kind(index)) > 0 for stage in range(3) for kind in (Forward, Backward) for index in (0, 1))
    assert cost(2, Backward(5)) == cost(2, Backward(1))  # as a longer step with the same micro-batches


def test_the_benchmark_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])  # as all other processes of tests
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, path = small_project(tmp_path), tmp_path / "rows.json"
    assert parallel_overhead.main(["--quick", "--rounds", "1", "--config", str(config), "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    check_rows(found)
    rows = {row["name"]: row["value"] for row in found}
    for stages in QUICK.stages:
        for count in (QUICK.micro_batches, 4 * QUICK.micro_batches):
            name = f"bubble-{stages}-stages-of-{count}"
            assert rows.pop(f"{name}-formula") == pytest.approx((stages - 1) / (count + stages - 1), rel=1e-5)
            assert 0 < rows.pop(f"{name}-computed") < 1
    assert 0 < rows.pop(f"bubble-2-stages-of-{QUICK.micro_batches}-measured") < 1
    assert 0 < rows.pop(f"sending-2-stages-of-{QUICK.micro_batches}-measured") < 1
    alone, step = rows.pop("one-process"), rows.pop("step-one-process")
    for kind in KINDS:
        # Of one round, the parts of the gap add up to it, and it is what the two speeds differ by.
        extra = {part: rows.pop(f"extra-{kind}-{part}") for part in ("compute", "communication", "waiting")}
        overhead = rows.pop(f"overhead-{kind}")
        assert rows.pop(kind) == pytest.approx(alone / (1 + overhead), rel=1e-4)
        assert extra["communication"] > 0
        assert extra["waiting"] > 0
        assert sum(extra.values()) == pytest.approx(overhead * step, rel=1e-3, abs=1e-6)
    assert not rows
