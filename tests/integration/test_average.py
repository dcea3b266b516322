"""average.py as users run it, on the snapshots of a run that was stopped and went on."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_tfm import average
from dist_tfm.checkpoint.weights import read_weights
from dist_tfm.errors import InputError
from tests.jobs import BIN, checkpoint_steps, read_metrics, run_job, small_project, train_command, training_lines

OPTIONS = ("--checkpoint.snapshot_every=2", "--checkpoint.keep_snapshots=4", "--train.validate_every=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps with a moving average, begun as a run of 7."""
    config = small_project(tmp_path_factory.mktemp("project"))
    for steps in (7, 12):
        arguments = ("--config", str(config), *OPTIONS, "--train.ema=0.8", f"--train.steps={steps}")
        done = run_job(train_command(1, *arguments))
        assert done.returncode == 0, done.stdout
    return config.parent / "run"


def snapshot_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "snapshots").iterdir())


def mean_of(paths: list[Path]) -> dict[str, Tensor]:
    weights = [read_weights(path) for path in paths]
    return {name: torch.stack([w[name].double() for w in weights]).mean(0).float() for name in weights[0]}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_snapshots_are_written_on_time_and_the_newest_are_kept(run: Path) -> None:
    assert snapshot_steps(run) == [6, 8, 10, 12]
    assert checkpoint_steps(run)[-2:] == [10, 12]
    for step in (10, 12):
        snapshot, checkpoint = run / "snapshots" / f"step_{step}", run / "checkpoints" / f"step_{step}"
        assert same(read_weights(snapshot), read_weights(checkpoint))
    assert not same(read_weights(run / "snapshots" / "step_8"), read_weights(run / "snapshots" / "step_10"))


def test_snapshots_and_a_moving_average_change_no_float_of_training(run: Path, tmp_path: Path) -> None:
    arguments = ("--config", str(run.parent / "small.yaml"), "--train.steps=12", "--train.validate_every=4")
    done = run_job(train_command(1, *arguments, f"--train.run_dir={tmp_path}/plain"))
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "plain" / "snapshots").exists()
    assert training_lines(tmp_path / "plain") == training_lines(run)
    with_average, plain = ([x for x in read_metrics(p) if "valid_loss" in x] for p in (run, tmp_path / "plain"))
    with_average = [line for line in with_average if line["step"] != 7]  # the last step of the first attempt
    assert [{k: v for k, v in x.items() if "_ema_" not in k} for x in with_average] == plain
    assert all({"valid_ema_loss", "valid_ema_nll", "valid_ema_ppl"} <= set(x) for x in with_average)


def test_the_average_translates_and_is_scored_like_any_checkpoint(run: Path, tmp_path: Path) -> None:
    done = run_job([sys.executable, "dist_tfm/average.py", str(run), "--last", "3"])
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"{run}/averaged: the mean of snapshots/step_8, snapshots/step_10, snapshots/step_12\n"
    expected = mean_of([run / "snapshots" / f"step_{step}" for step in (8, 10, 12)])
    assert same(read_weights(run / "averaged"), expected)
    texts = ["--source", str(run.parent / "valid.en"), "--reference", str(run.parent / "valid.de")]
    report = tmp_path / "r.json"
    command = [str(BIN / "dist-tfm"), "evaluate", "--checkpoint", str(run / "averaged"), *texts, "--forced"]
    scored = run_job([*command, "--json", str(report)])
    assert scored.returncode == 0, scored.stdout
    validated = [line["valid_nll"] for line in read_metrics(run) if "valid_loss" in line]
    assert min(validated) - 0.1 < json.loads(report.read_text())["nll"] < validated[0] + 0.1
    arguments = ("--config", str(run.parent / "small.yaml"), "--train.steps=1", f"--train.init_from={run}/averaged")
    started = run_job(train_command(1, *arguments, f"--train.run_dir={tmp_path}/new"))
    assert started.returncode == 0, started.stdout
    assert training_lines(tmp_path / "new")[0]["loss"] < training_lines(run)[0]["loss"] - 0.1


def test_best_and_moving_averages_are_written_where_they_were_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {line["step"]: line["valid_nll"] for line in read_metrics(run) if "valid_loss" in line}
    assert set(values) == {4, 7, 8, 12}
    best = min((8, 12), key=lambda step: values[step])
    assert average.main([str(run), "--best", "1", "--output", str(tmp_path / "best")]) == 0
    assert f"the mean of snapshots/step_{best}" in capsys.readouterr().out
    assert same(read_weights(tmp_path / "best"), read_weights(run / "snapshots" / f"step_{best}"))
    assert average.main([str(run), "--ema", "--output", str(tmp_path / "ema")]) == 0
    assert same(read_weights(tmp_path / "ema"), read_weights(run, "ema"))
    assert not same(read_weights(tmp_path / "ema"), read_weights(run))
    assert average.main([str(run), "--output", str(tmp_path / "all")]) == 0
    steps = json.loads((tmp_path / "all" / "counters.json").read_text())["averaged"]["steps"]
    assert steps == [6, 8, 10, 12]


def test_what_cannot_be_averaged_is_one_sentence_with_exit_code_two(run: Path, tmp_path: Path) -> None:
    done = run_job([sys.executable, "dist_tfm/average.py", str(run), "--last", "9"])
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert "expected 9 to average, found 4" in done.stdout
    for arguments, said in (
        ([str(run), "--best", "3"], "validated step"),
        ([str(tmp_path)], "found none"),
        ([str(run), "--output", str(run)], "found something else"),
    ):
        with pytest.raises(InputError, match=said):
            average.main(arguments)
    for arguments in ([str(run), "--last", "0"], [str(run), "--last", "1", "--best", "1"], []):
        with pytest.raises(SystemExit) as caught:
            average.main(arguments)
        assert caught.value.code == 2
