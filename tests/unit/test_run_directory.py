"""The run directory: lock, foreign contents, changed configuration, attempts."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dist_tfm.config.loading import config_to_yaml, read_config
from dist_tfm.config.schema import Config, TrainConfig
from dist_tfm.errors import ConfigError, InputError, RunError
from dist_tfm.training.progress import Progress
from dist_tfm.training.run_directory import RunDirectory, describe_environment, write_text_atomically


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        RunDirectory(tmp_path).check(Config())
    with pytest.raises(InputError, match="expected a directory, found a file"):
        RunDirectory(tmp_path / "thesis.tex").check(Config())


def test_what_a_killed_start_left_is_no_foreign_thing(tmp_path: Path) -> None:
    for name in (".lock", "config.yaml.tmp", "metrics.jsonl"):
        (tmp_path / name).touch()
    directory = RunDirectory(tmp_path)
    directory.check(Config())
    directory.begin_attempt(Config(), {"launcher": "single"})
    assert read_config(directory.config) == Config()
    assert len(json.loads(directory.environment.read_text())) == 1
    new = RunDirectory(tmp_path / "new")
    new.check(Config())
    assert not new.path.exists(), "looking makes nothing"


def test_a_changed_configuration_is_refused_with_keys_and_both_values(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin_attempt(Config(), {"launcher": "a"})
    other = dataclasses.replace(Config(), train=TrainConfig(seed=7, label_smoothing=0.3, steps=5))
    with pytest.raises(ConfigError) as caught:
        directory.check(other)
    assert "train.seed: the run was started with 1, now asked for 7" in str(caught.value)
    assert "train.label_smoothing" in str(caught.value)
    assert "train.steps" not in str(caught.value)
    directory.check(dataclasses.replace(Config(), train=TrainConfig(steps=5)))


def test_every_attempt_is_one_entry(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for launcher in ("single", "torchrun"):
        directory.begin_attempt(Config(), describe_environment(launcher, ["host"], ["cpu"]))
    attempts = json.loads(directory.environment.read_text())
    assert [a["launcher"] for a in attempts] == ["single", "torchrun"]
    assert attempts[0]["versions"]["torch"]
    assert directory.config.read_text() == config_to_yaml(Config())


def test_a_second_run_waits_for_the_lock_then_gives_up_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from dist_tfm.training.run_directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).locked(): print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="in use by another run"), RunDirectory(tmp_path).locked(patience=0.3):
            pytest.fail("two runs in one directory")
        other.kill()
        other.wait()
        with RunDirectory(tmp_path).locked(patience=5.0):
            pass
    finally:
        other.kill()
        other.wait()


def test_done_comes_and_goes(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.mark_done(20)
    assert directory.done.read_text() == "20\n"
    directory.clear_done()
    directory.clear_done()
    assert not directory.done.exists()


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_text_atomically(path, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data_pipeline.files.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"


def test_progress_survives_json_and_counts_skips() -> None:
    progress = Progress()
    progress = progress.after_step(progress.position, applied=True, flops=5)
    progress = progress.after_step(progress.position, applied=False, flops=9)
    progress = progress.after_step(progress.position, applied=False, flops=9)
    assert (progress.step, progress.updates, progress.skipped_steps, progress.skips_in_a_row) == (3, 1, 2, 2)
    progress = progress.with_candidate("valid_nll", 2.5, larger_is_better=False)
    assert progress.with_candidate("valid_nll", 2.6, larger_is_better=False) == progress
    assert progress.with_candidate("valid_nll", 2.4, larger_is_better=False).best_value == 2.4
    assert progress.with_candidate("valid_nll", math.nan, larger_is_better=False) == progress
    assert progress.with_candidate("valid_bleu", 0.1, larger_is_better=True).best_value == 0.1, "another metric"
    assert Progress().with_candidate("valid_bleu", math.inf, larger_is_better=True) == Progress()
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
    assert progress.after_step(progress.position, applied=True, flops=9).skips_in_a_row == 0


@pytest.mark.parametrize(
    "change", [{"flops": None}, {"updates": -1}, {"step": "5"}, {"extra": 1}, {"best_value": math.nan}]
)
def test_counters_that_lie_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(RunError, match=r"counters\.json"):
        Progress.from_json(Progress().to_json() | change)
    with pytest.raises(RunError, match=r"counters\.json"):
        Progress.from_json(Progress().to_json() | {"position": {"epoch": "x", "window": 0, "step": 0}})
    with pytest.raises(RunError, match=r"counters\.json"):
        Progress.from_json(Progress().to_json() | {"position": {"epoch": 0, "window": -1, "step": 0}})
