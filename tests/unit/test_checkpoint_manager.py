"""The checkpoint manager in one process, over an engine whose state is a few tensors."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_tfm.checkpoint import files, manager, restore
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.checkpoint.restore import load_weights_only
from dist_tfm.checkpoint.weights import find_checkpoint, read_weights
from dist_tfm.engine.base import STATE_KINDS, Fragment
from dist_tfm.errors import DistTfmError, InputError, RunError
from dist_tfm.parallel.collectives import SingleProcess
from dist_tfm.parallel.tags import Tag


class TensorsEngine:
    """The part of `Engine` that checkpoints use."""

    def __init__(self, seed: int, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.shapes = shapes or {"embedding.weight": (5, 4), "norm.bias": (3,)}
        generator = torch.Generator().manual_seed(seed)
        self.state: dict[str, dict[str, Tensor]] = {
            name: {kind: torch.randn(shape, generator=generator).flatten() for kind in STATE_KINDS}
            for name, shape in self.shapes.items()
        }
        self.updates = 0
        self.restorations: list[int] = []

    def fragments(self, divide: bool) -> list[Fragment]:
        return [
            Fragment(Tag(name, shape, 0, 0, shape[0], True), 0, self.state[name]["fp32"].numel(), self.state[name])
            for name, shape in self.shapes.items()
        ]

    def restored(self, updates: int) -> None:
        self.updates = updates
        self.restorations.append(updates)

    def same_as(self, other: "TensorsEngine", kinds: tuple[str, ...] = STATE_KINDS) -> bool:
        return all(torch.equal(self.state[n][k], other.state[n][k]) for n in self.state for k in kinds)


class Run:
    """A run directory with its manager and what it warned of."""

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path / "run"
        self.tokenizer = path / "spm.model"
        self.tokenizer.write_bytes(b"pieces")
        self.warnings: list[str] = []
        self.manager = CheckpointManager(self.path, SingleProcess(), keep, self.warnings.append)

    def save(self, engine: TensorsEngine, step: int, best: int | None = None) -> Path:
        counters = {"position": {"epoch": 1, "window": 0, "step": step}, "best_value": None}
        return self.manager.save(engine, step, counters, "train:\n  steps: 3\n", self.tokenizer, best)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path / "checkpoints"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_round_trip_restores_every_bit_and_the_counters(run: Run) -> None:
    saved, loaded = TensorsEngine(1), TensorsEngine(2)
    saved.updates = 6
    checkpoint = run.save(saved, 7)
    assert not loaded.same_as(saved)
    assert run.manager.newest_valid() == checkpoint
    counters = run.manager.load(checkpoint, loaded)  # type: ignore[arg-type]
    position = {"epoch": 1, "window": 0, "step": 7}
    assert counters == {"position": position, "best_value": None, "step": 7, "updates": 6}
    assert loaded.same_as(saved)
    assert loaded.restorations == [6]
    assert run.warnings == []


def test_layout_on_disk_is_the_documented_one(run: Run) -> None:
    checkpoint = run.save(TensorsEngine(1), 3)
    assert checkpoint == run.path / "checkpoints" / "step_3"
    assert sorted(os.listdir(checkpoint)) == [
        "COMPLETE",
        "config.yaml",
        "counters.json",
        "index.json",
        "state-00000-of-00001.safetensors",
        "tokenizer.model",
    ]
    listed = json.loads((checkpoint / "COMPLETE").read_text())["files"]
    assert sorted(listed) == sorted(set(os.listdir(checkpoint)) - {"COMPLETE"})
    assert all(listed[name]["size"] == (checkpoint / name).stat().st_size for name in listed)
    assert (checkpoint / "config.yaml").read_text() == "train:\n  steps: 3\n"
    assert (checkpoint / "tokenizer.model").read_bytes() == b"pieces"


def test_new_run_has_no_checkpoint(run: Run) -> None:
    assert run.manager.newest_valid() is None


def test_marker_is_written_last_and_everything_is_synced_before_the_rename(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_write, real_sync, real_rename = manager.write_file, manager.sync_directory, os.rename
    monkeypatch.setattr(manager, "write_file", lambda p, c: (events.append(p.name), real_write(p, c))[1])
    monkeypatch.setattr(manager, "sync_directory", lambda p: (events.append(f"sync {p.name}"), real_sync(p))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), real_rename(a, b))[1])
    run.save(TensorsEngine(1), 3)
    assert events[-5:] == ["COMPLETE", "sync step_3.tmp", "rename", "sync checkpoints", "sync run"]


@pytest.mark.parametrize("fault_at", range(1, 9))
def test_kill_at_any_moment_leaves_the_old_one_valid(run: Run, monkeypatch: pytest.MonkeyPatch, fault_at: int) -> None:
    """The process dies at its n-th sync: step_2 is then complete or absent, and step_1 or step_2 loads."""
    first, second = TensorsEngine(1), TensorsEngine(2)
    run.save(first, 1)
    count = 0

    class Killed(BaseException):
        pass

    real = os.fsync

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == fault_at:
            raise Killed
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(Killed):
            run.save(second, 2)
    again = Run(run.path.parent)
    checkpoint = again.manager.newest_valid()
    assert checkpoint is not None
    loaded = TensorsEngine(3)
    again.manager.load(checkpoint, loaded)  # type: ignore[arg-type]
    assert loaded.same_as(second if checkpoint.name == "step_2" else first)
    assert ("step_2" in again.names()) == (checkpoint.name == "step_2")
    if checkpoint.name == "step_1":
        assert "step_2.tmp was not finished" in again.warnings[0]
        again.save(second, 2)
        assert again.names() == ["step_1", "step_2"]


def test_every_file_of_a_checkpoint_is_verified(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Run(folder)
        run.save(TensorsEngine(1), 1)
        newest = run.save(TensorsEngine(1), 2)
        victim = sorted(newest.iterdir())[number]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 4
        victim.write_bytes(data)
        checkpoint = run.manager.newest_valid()
        assert checkpoint is not None
        assert checkpoint.name == "step_1", victim.name
        assert victim.name in run.warnings[0]


def test_damaged_ones_are_moved_aside_under_names_of_their_own(run: Run) -> None:
    run.save(TensorsEngine(1), 1)
    for count in (1, 2, 3):
        newest = run.save(TensorsEngine(count), 2)
        (newest / "index.json").unlink()
        assert run.manager.newest_valid() == run.path / "checkpoints" / "step_1"
        assert len(run.warnings) == count
    assert run.names() == ["step_1", "step_2.damaged", "step_2.damaged.2", "step_2.damaged.3"]


def test_a_checkpoint_of_another_format_stops_the_run_and_is_left_alone(run: Run) -> None:
    checkpoint = run.save(TensorsEngine(1), 1)
    (checkpoint / "COMPLETE").write_bytes(files.seal({"format": 2, "step": 1, "files": {}}))
    with pytest.raises(InputError, match="format 1, found 2"):
        run.manager.newest_valid()
    assert run.names() == ["step_1"]


def test_only_damaged_ones_stop_the_run_for_good(run: Run) -> None:
    checkpoint = run.save(TensorsEngine(1), 1)
    (checkpoint / "COMPLETE").unlink()
    for _ in range(2):
        with pytest.raises(RunError, match=r"every checkpoint is damaged \(step_1.damaged\)") as caught:
            run.manager.newest_valid()
        assert caught.value.exit_code == 1
    assert run.names() == ["step_1.damaged"]


@pytest.mark.parametrize("keep", [1, 2])
def test_rotation_spares_the_newest_and_the_best(tmp_path: Path, keep: int) -> None:
    run = Run(tmp_path, keep)
    for step in range(1, 6):
        run.save(TensorsEngine(step), step, best=1)
    assert run.names() == (["step_1", "step_5"] if keep == 1 else ["step_1", "step_4", "step_5"])
    assert run.warnings == []


def test_full_disk_leaves_what_was_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(TensorsEngine(1), 1)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"no space left while writing the checkpoint .*step_2") as caught:
            run.save(TensorsEngine(2), 2)
    assert caught.value.exit_code == 1
    assert run.names() == ["step_1"]
    assert run.manager.newest_valid() is not None


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (
            {"embedding.weight": (6, 4), "norm.bias": (3,)},
            r"embedding.weight has shape \[6, 4\] in the model and \[5, 4\]",
        ),
        (
            {"embedding.weight": (4, 5), "norm.bias": (3,)},
            r"embedding.weight has shape \[4, 5\] in the model and \[5, 4\]",
        ),
        ({"embedding.weight": (5, 4), "norm.bias": (3,), "new.bias": (2,)}, r"new.bias \[2\] is in the model and not"),
        ({"embedding.weight": (5, 4)}, r"norm.bias \[3\] is in the checkpoint and not"),
    ],
)
def test_another_architecture_changes_nothing(run: Run, shapes: dict[str, tuple[int, ...]], said: str) -> None:
    checkpoint = run.save(TensorsEngine(1), 1)
    engine, twin = TensorsEngine(2, shapes), TensorsEngine(2, shapes)
    for load in (
        lambda: run.manager.load(checkpoint, engine),  # type: ignore[arg-type]
        lambda: load_weights_only(run.path, engine, SingleProcess()),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said) as caught:
            load()
        assert caught.value.exit_code == 2
    assert engine.same_as(twin)
    assert engine.restorations == []


def test_init_from_takes_the_weights_alone(run: Run) -> None:
    saved, engine, twin = TensorsEngine(1), TensorsEngine(2), TensorsEngine(2)
    checkpoint = run.save(saved, 4)
    for path in (run.path, checkpoint):
        load_weights_only(path, engine, SingleProcess())  # type: ignore[arg-type]
        assert engine.same_as(saved, ("fp32",))
        assert engine.same_as(twin, ("exp_avg", "exp_avg_sq"))
    assert engine.restorations == [0, 0]


def test_weights_are_read_whole_and_verified(run: Run) -> None:
    saved = TensorsEngine(1)
    run.save(TensorsEngine(5), 3)
    checkpoint = run.save(saved, 4)
    for path in (run.path, checkpoint):
        weights = read_weights(path)
        assert {name: tuple(t.shape) for name, t in weights.items()} == saved.shapes
        assert all(torch.equal(t.flatten(), saved.state[name]["fp32"]) for name, t in weights.items())
    state = checkpoint / "state-00000-of-00001.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    for path in (run.path, checkpoint):
        with pytest.raises(InputError, match=r"step_4: expected a complete checkpoint, but state-00000.*found"):
            read_weights(path)
    assert run.names() == ["step_3", "step_4"]  # reading moves nothing


@pytest.mark.parametrize("exists", [True, False])
def test_looking_for_a_checkpoint_where_there_is_none(tmp_path: Path, exists: bool) -> None:
    path = tmp_path if exists else tmp_path / "nowhere"
    with pytest.raises(InputError, match="found none" if exists else "found no such directory"):
        find_checkpoint(path)


def test_a_saved_step_is_not_overwritten(run: Run) -> None:
    run.save(TensorsEngine(1), 1)
    with pytest.raises(RunError, match="not overwritten"):
        run.save(TensorsEngine(2), 1)
    loaded = TensorsEngine(3)
    run.manager.load(run.path / "checkpoints" / "step_1", loaded)  # type: ignore[arg-type]
    assert loaded.same_as(TensorsEngine(1))


def test_counters_that_are_no_counters_are_refused(run: Run) -> None:
    checkpoint = run.save(TensorsEngine(1), 1)
    (checkpoint / "counters.json").write_text("[]")
    with pytest.raises(InputError, match="expected the counters of a checkpoint"):
        restore.read_counters(checkpoint)


def test_not_a_number_among_the_counters_is_refused(run: Run) -> None:
    with pytest.raises(DistTfmError, match="JSON compliant"):
        run.manager.save(TensorsEngine(1), 1, {"best_value": float("nan")}, "", run.tokenizer)  # type: ignore[arg-type]
    assert run.names() == []


def test_a_checkpoint_under_another_ones_name_is_not_believed(run: Run) -> None:
    run.save(TensorsEngine(1), 3)
    run.save(TensorsEngine(1), 5)
    (run.path / "checkpoints" / "step_5").rename(run.path / "checkpoints" / "step_6")
    newest = run.manager.newest_valid()
    assert newest is not None
    assert newest.name == "step_3"
    assert "which its name denies" in run.warnings[0]
    (run.path / "checkpoints" / "step_3").rename(run.path / "checkpoints" / "step_0003")
    with pytest.raises(RunError, match="damaged"):
        run.manager.newest_valid()
