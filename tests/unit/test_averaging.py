"""Averages of checkpoints, snapshots, the moving average, and reading a run's validation values back."""

import errno
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_tfm.checkpoint import average
from dist_tfm.checkpoint.average import average_checkpoints, choose_best, choose_last, find_members, newest_checkpoint
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.checkpoint.restore import load_weights_only
from dist_tfm.checkpoint.snapshots import SnapshotStore
from dist_tfm.checkpoint.weights import find_checkpoint, read_weights, verify
from dist_tfm.config.loading import config_to_yaml, read_config
from dist_tfm.config.schema import CheckpointConfig, Config, ModelConfig
from dist_tfm.engine.base import STATE_KINDS, Fragment
from dist_tfm.engine.moving_average import MovingAverage
from dist_tfm.errors import InputError, RunError
from dist_tfm.metrics.reading import metric_values
from dist_tfm.parallel.collectives import SingleProcess
from dist_tfm.parallel.tags import Tag

SHAPES = {"embedding.weight": (5, 4), "norm.bias": (3,)}


class Weights:
    """The part of `Engine` that checkpoints use, with random state of the given kinds."""

    def __init__(self, seed: int, kinds: tuple[str, ...] = STATE_KINDS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.state = {
            name: {kind: torch.randn(shape, generator=generator).flatten() for kind in kinds}
            for name, shape in SHAPES.items()
        }
        self.updates = 10 * seed

    def fragments(self, divide: bool) -> list[Fragment]:
        return [
            Fragment(Tag(name, shape, 0, 0, shape[0], True), 0, self.state[name]["fp32"].numel(), self.state[name])
            for name, shape in SHAPES.items()
        ]

    def restored(self, updates: int) -> None:
        self.updates = updates


class Run:
    """A run directory with checkpoints and snapshots; the state at step N has the seed N."""

    def __init__(self, folder: Path, config: Config | None = None, tokenizer: bytes = b"pieces") -> None:
        self.path = folder / "run"
        self.config = config or Config()
        self.tokenizer = folder / "spm.model"
        folder.mkdir(exist_ok=True)
        self.tokenizer.write_bytes(tokenizer)
        self.warnings: list[str] = []
        self.manager = CheckpointManager(self.path, SingleProcess(), 10, self.warnings.append)

    def checkpoint(self, step: int, kinds: tuple[str, ...] = STATE_KINDS) -> Path:
        text = config_to_yaml(self.config)
        return self.manager.save(Weights(step, kinds), step, {}, text, self.tokenizer)  # type: ignore[arg-type]

    def snapshot(self, step: int, keep: int = 10, seed: int | None = None) -> Path:
        store = SnapshotStore(self.path, SingleProcess(), keep, self.warnings.append)
        weights = Weights(step if seed is None else seed)
        return store.save(weights, step, {}, config_to_yaml(self.config), self.tokenizer)  # type: ignore[arg-type]

    def snapshots(self) -> list[str]:
        return sorted(os.listdir(self.path / "snapshots"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def mean_of(seeds: list[int], kind: str = "fp32", kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, Tensor]:
    """The mean in double precision, rounded once."""
    states = [Weights(seed, kinds).state for seed in seeds]
    return {
        name: torch.stack([state[name][kind].double() for state in states]).mean(0).float().view(shape)
        for name, shape in SHAPES.items()
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_average_is_the_mean_as_a_checkpoint_of_weights_alone(run: Run, tmp_path: Path) -> None:
    members = [run.snapshot(step) for step in (2, 4, 7)]
    output = run.path / "averaged"
    average_checkpoints(members, output)
    verify(output)
    assert same(read_weights(output), mean_of([2, 4, 7]))
    assert sorted(os.listdir(output)) == sorted(os.listdir(members[0])), "the canonical files"
    assert read_config(output / "config.yaml") == run.config
    assert (output / "tokenizer.model").read_bytes() == b"pieces"
    counters = json.loads((output / "counters.json").read_text())
    assert counters == {"step": 7, "updates": 70, "averaged": {"kind": "fp32", "steps": [2, 4, 7]}}
    assert sorted(os.listdir(run.path)) == ["averaged", "snapshots"], "nothing else is left"
    engine = Weights(99)
    load_weights_only(output, engine, SingleProcess())  # type: ignore[arg-type]
    assert same({n: engine.state[n]["fp32"].view(s) for n, s in SHAPES.items()}, mean_of([2, 4, 7]))
    for kind in ("ema", "exp_avg"):
        with pytest.raises(InputError, match=f"expected it to hold {kind}/embedding.weight"):
            read_weights(output, kind)


def test_run_means_its_newest_checkpoint_and_the_average_must_be_named(run: Run) -> None:
    newest = run.checkpoint(5)
    average_checkpoints([run.snapshot(8), run.snapshot(9)], run.path / "averaged")
    assert find_checkpoint(run.path) == newest
    assert find_checkpoint(run.path / "averaged") == run.path / "averaged"
    assert run.manager.newest_valid() == newest, "no run resumes from a snapshot or an average"
    assert run.warnings == []


def test_one_tensor_is_in_memory_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [run.snapshot(1), run.snapshot(2)]
    made: list[weakref.ref[Tensor]] = []
    real = average._mean

    def watched(*arguments: object) -> Tensor:
        assert sum(reference() is not None for reference in made) <= 1
        tensor = real(*arguments)  # type: ignore[arg-type]
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(average, "_mean", watched)
    average_checkpoints(members, run.path / "averaged")
    assert len(made) == len(SHAPES)


def test_moving_average_of_a_checkpoint_becomes_one_of_weights(run: Run) -> None:
    kinds = (*STATE_KINDS, "ema")
    checkpoint = run.checkpoint(3, kinds)
    assert newest_checkpoint(run.path) == checkpoint
    average_checkpoints([checkpoint], run.path / "averaged", kind="ema")
    expected = mean_of([3], "ema", kinds)
    assert same(read_weights(run.path / "averaged"), expected)
    assert same(read_weights(checkpoint, "ema"), expected)
    assert not same(read_weights(checkpoint), expected)
    plain = run.checkpoint(4)
    with pytest.raises(InputError, match=r"step_4: expected it to hold ema/embedding\.weight"):
        average_checkpoints([plain], run.path / "other", kind="ema")
    assert not (run.path / "other").exists()
    assert not (run.path / "other.tmp").exists()


def test_snapshots_come_before_checkpoints_and_the_last_are_taken(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(Config(), checkpoint=CheckpointConfig(keep=2)))
    for step in (1, 2, 30):
        run.checkpoint(step)
    assert names(choose_last(find_members(run.path), None)) == ["step_2", "step_30"], "checkpoint.keep of them"
    for step in (5, 10, 9):
        run.snapshot(step)
    members = find_members(run.path)
    assert [f"{p.parent.name}/{p.name}" for p in members] == [f"snapshots/step_{n}" for n in (5, 9, 10)]
    assert choose_last(members, None) == members, "rotation keeps as many as the recipe wants"
    assert names(choose_last(members, 2)) == ["step_9", "step_10"]
    with pytest.raises(InputError, match=r"expected 4 to average, found 3 \(step_5, step_9, step_10\)"):
        choose_last(members, 4)


def test_best_are_taken_by_their_validation_value(run: Run) -> None:
    members = [run.snapshot(step) for step in (1, 2, 3, 4, 5)]
    values = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0, 9: 0.1}
    assert names(choose_best(members, 2, values, larger_is_better=False)) == ["step_2", "step_4"], "of equals the later"
    assert names(choose_best(members, 2, values, larger_is_better=True)) == ["step_1", "step_4"]
    assert names(choose_best(members, 4, values, larger_is_better=True)) == ["step_1", "step_2", "step_3", "step_4"]
    with pytest.raises(InputError, match=r"expected 5 to average that were written at a validated step.*found 4"):
        choose_best(members, 5, values, larger_is_better=False)


def test_what_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    snapshot = run.snapshot(1)
    for find in (find_members, newest_checkpoint):
        with pytest.raises(InputError, match="found a single checkpoint"):
            find(snapshot)
    with pytest.raises(InputError, match="no such directory"):
        find_members(tmp_path / "nowhere")
    with pytest.raises(InputError, match="found none"):
        find_members(tmp_path)


def test_members_must_be_whole_and_of_one_model_and_tokenizer(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    other_model = Run(tmp_path / "b", replace(Config(), model=ModelConfig(norm="pre"))).snapshot(2)
    other_tokenizer = Run(tmp_path / "c", tokenizer=b"other").snapshot(3)
    first, damaged = run.snapshot(1), run.snapshot(2)
    state = next(damaged.glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    for member, said in (
        (other_model, "expected the model of"),
        (other_tokenizer, "expected the tokenizer of"),
        (damaged, "its checksum differs"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            average_checkpoints([first, member], tmp_path / "averaged")
        assert caught.value.exit_code == 2
        assert str(member) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_an_average_is_replaced_and_nothing_else_is(run: Run, tmp_path: Path) -> None:
    members = [run.snapshot(1), run.snapshot(2)]
    output = run.path / "averaged"
    average_checkpoints(members, output)
    average_checkpoints(members[1:], output)
    assert same(read_weights(output), mean_of([2]))
    checkpoint = run.checkpoint(7)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "file").write_text("mine")
    for target in (checkpoint, members[0], tmp_path / "foreign", tmp_path / "file"):
        with pytest.raises(InputError, match="found something else"):
            average_checkpoints(members, target)
    assert same(read_weights(checkpoint), mean_of([7]))
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(run.path)) == ["averaged", "checkpoints", "snapshots"]


def test_full_disk_leaves_the_earlier_average(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [run.snapshot(1), run.snapshot(2)]
    output = run.path / "averaged"
    average_checkpoints(members[:1], output)
    for fault_at in (1, 3):
        calls = 0

        def full(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls == fault_at:  # noqa: B023 (it is called within this turn of the loop)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                average_checkpoints(members, output)
        assert same(read_weights(output), mean_of([1]))
        assert sorted(os.listdir(run.path)) == ["averaged", "snapshots"]


def test_snapshots_hold_weights_alone_and_rotate(run: Run) -> None:
    (run.path / "snapshots" / "step_3.tmp").mkdir(parents=True)
    for step in range(1, 6):
        snapshot = run.snapshot(step, keep=2)
        assert same(read_weights(snapshot), mean_of([step]))
        size = sum(p.stat().st_size for p in snapshot.glob("*.safetensors"))
        assert size < 4 * 23 + 400, "23 elements and a header"
    assert run.snapshots() == ["step_4", "step_5"]
    assert run.warnings == []


def test_snapshot_of_a_step_that_was_trained_again_is_replaced(run: Run) -> None:
    for step in (2, 4, 6):
        run.snapshot(step)
    run.snapshot(4, keep=2, seed=99)
    assert same(read_weights(run.path / "snapshots" / "step_4"), mean_of([99]))
    assert run.snapshots() == ["step_2", "step_4", "step_6"], "step 6 will be replaced in its turn"


def test_full_disk_ends_the_run_and_keeps_earlier_snapshots(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.snapshot(1)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"no space left while writing the snapshot .*step_2"):
            run.snapshot(2)
    assert run.snapshots() == ["step_1"]
    assert same(read_weights(run.path / "snapshots" / "step_1"), mean_of([1]))


def test_a_run_cannot_resume_from_weights_alone(run: Run) -> None:
    snapshot = run.snapshot(4)
    target = run.path / "checkpoints" / "step_4"
    target.parent.mkdir()
    os.rename(snapshot, target)
    with pytest.raises(InputError, match=r"expected it to hold exp_avg/embedding\.weight"):
        run.manager.load(target, Weights(1))  # type: ignore[arg-type]


def test_moving_average_follows_its_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(7, generator=generator), torch.randn(3, 2, generator=generator).requires_grad_()]
    averaged = MovingAverage(weights, decay=0.5)
    expected = [w.detach().double().clone() for w in weights]
    for update in range(1, 20):
        decay = min(0.5, (1 + update) / (10 + update))
        for weight, mean in zip(weights, expected, strict=True):
            weight.data.add_(torch.randn(weight.shape, generator=generator))
            mean.mul_(decay).add_(weight.detach().double(), alpha=1 - decay)
        averaged.update(update)
        for weight, mean in zip(weights, expected, strict=True):
            torch.testing.assert_close(averaged.tensors[weight].double(), mean, rtol=1e-6, atol=1e-6)
    held = [(w.detach().clone(), averaged.tensors[w].clone()) for w in weights]
    averaged.swap()
    assert all(
        torch.equal(w, a) and torch.equal(averaged.tensors[w], b) for w, (b, a) in zip(weights, held, strict=True)
    )
    averaged.swap()
    assert all(
        torch.equal(w, a) and torch.equal(averaged.tensors[w], b) for w, (a, b) in zip(weights, held, strict=True)
    )


def test_metric_values_are_read_from_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": 9.0},
        {"step": 1, "valid_loss": 8.0, "valid_nll": 7.5},
        {"step": 2, "valid_loss": None, "valid_nll": None},
        {"step": 3, "valid_nll": 6},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "valid_nll": 5')
    assert metric_values(path, "valid_nll") == {1: 7.5, 3: 6.0}
    assert metric_values(path, "valid_bleu") == {}
    with pytest.raises(InputError, match="cannot be read"):
        metric_values(tmp_path / "none", "valid_nll")
    path.write_text('{"step": 1}\nnothing\n')
    with pytest.raises(InputError, match="line 2: expected a record"):
        metric_values(path, "valid_nll")
