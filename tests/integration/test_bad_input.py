"""A user's mistakes: one clear sentence, the right exit code, no traceback, on one rank and on two."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_tfm.checkpoint.files import FileRecord
from dist_tfm.checkpoint.manifest import manifest_bytes, read_manifest
from tests.jobs import (
    ROOT,
    checkpoint_steps,
    clean_environment,
    run_job,
    small_project,
    start_ranks,
    train_command,
    training_lines,
    wait_for_ranks,
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project that has trained for 6 steps in `run`; returns its configuration. Tests copy what they damage."""
    config = small_project(tmp_path_factory.mktemp("project"))
    done = run_job(train_command(1, "--config", str(config), "--train.steps=6", "--train.validate_every=0"))
    assert done.returncode == 0, done.stdout
    return config


def assert_refused(output: str, code: int, expected_code: int, *parts: str) -> None:
    assert code == expected_code, output
    assert "Traceback" not in output, output
    for part in parts:
        assert part in output, output


def expect_failure(config: Path, *arguments: str, code: int = 2, parts: tuple[str, ...]) -> None:
    done = run_job(train_command(1, "--config", str(config), *arguments), timeout=120)
    assert_refused(done.stdout, done.returncode, code, *parts)


def test_two_misspelt_keys_at_once(project: Path) -> None:
    expect_failure(
        project, "--train.stepz=3", "--modle.dropout=0", parts=("train.stepz", "train.steps", "modle.dropout")
    )


def test_a_missing_corpus(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    (tmp_path / "train.de").unlink()
    expect_failure(config, parts=("error:", "train.de"))


def test_an_empty_corpus(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    (tmp_path / "train.en").write_text("")
    (tmp_path / "train.de").write_text("")
    expect_failure(config, parts=("error:", "train.en"))


def test_sides_of_different_length(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    with (tmp_path / "train.de").open("a") as file:
        file.write("eine Zeile mehr\n")
    expect_failure(config, parts=("300", "301"))


def test_a_wrong_encoding(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    (tmp_path / "train.de").write_bytes((tmp_path / "train.de").read_text().encode("latin-1", errors="replace"))
    expect_failure(config, parts=("UTF-8", "train.de"))


def test_a_foreign_run_directory(project: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    expect_failure(project, f"--train.run_dir={tmp_path}", parts=("thesis.tex",))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"], "nothing was written into it"


def test_a_changed_configuration(project: Path) -> None:
    expect_failure(project, "--train.seed=5", parts=("train.seed", "5"))


def test_a_checkpoint_of_another_architecture(project: Path, tmp_path: Path) -> None:
    expect_failure(
        project,
        f"--train.init_from={project.parent}/run",
        "--model.d_ff=48",
        f"--train.run_dir={tmp_path}/new",
        parts=("feed_forward", "64", "48"),
    )


def test_a_tokenizer_that_does_not_match_the_shards(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "shards", tmp_path / "shards")
    model = tmp_path / "shards" / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\n")
    expect_failure(project, f"--data.shards={tmp_path}/shards", f"--train.run_dir={tmp_path}/r", parts=("tokenizer",))


def test_a_truncated_shard(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "shards", tmp_path / "shards")
    shard = sorted((tmp_path / "shards" / "train").glob("*.tar"))[0]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    where = (f"--data.shards={tmp_path}/shards", f"--train.run_dir={tmp_path}/r")
    expect_failure(project, *where, parts=(shard.name,))
    skipping = ("--data.on_error=skip", "--data.most_skipped=0.5", "--train.steps=6", "--log.every_steps=1")
    done = run_job(train_command(1, "--config", str(project), *where, *skipping))
    assert done.returncode == 0, done.stdout
    assert f"64 training pairs are left out, 1 block(s): {shard}, block 1 at byte" in done.stdout
    assert 0 < sum(line["left_out_pairs"] for line in training_lines(tmp_path / "r")) <= 64


def test_a_truncated_shard_on_two_ranks_ends_both(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "shards", tmp_path / "shards")
    shard = sorted((tmp_path / "shards" / "train").glob("*.tar"))[0]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 700)
    done = run_job(
        train_command(2, "--config", str(project), f"--data.shards={tmp_path}/shards", f"--train.run_dir={tmp_path}/r"),
        timeout=120,
    )
    assert done.returncode != 0
    assert shard.name in done.stdout
    before = done.stdout.split("torch/distributed", 1)[0]
    assert "error:" in before, "the user sees our sentence before the launcher's traceback"
    assert done.stdout.count("error: ") == 1, "one rank says it for all"


def test_every_checkpoint_damaged_never_starts_again(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "run", tmp_path / "run")
    for step in checkpoint_steps(tmp_path / "run"):
        for file in (tmp_path / "run" / "checkpoints" / f"step_{step}").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-3])
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    arguments = ("--train.steps=8", f"--train.run_dir={tmp_path}/run")
    for _ in range(2):
        expect_failure(project, *arguments, code=1, parts=("damaged",))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics, "nothing already written is lost"


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "run", tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step_6").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    common = ("--config", str(project), "--train.steps=8", "--train.validate_every=0")
    done = run_job(train_command(1, *common, f"--train.run_dir={tmp_path}/run"))
    assert done.returncode == 0, done.stdout
    assert "step_6" in done.stdout
    assert "resumed at step 5" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step_6.damaged").is_dir()
    whole = run_job(train_command(1, *common, f"--train.run_dir={tmp_path}/whole"))
    assert whole.returncode == 0, whole.stdout
    assert training_lines(tmp_path / "run") == training_lines(tmp_path / "whole")


def test_diverging_ends_with_exit_code_three(project: Path, tmp_path: Path) -> None:
    expect_failure(
        project,
        "--schedule.peak=1.0e+30",
        "--train.max_skips=3",
        "--train.validate_every=0",
        f"--train.run_dir={tmp_path}/d",
        code=3,
        parts=("diverged", "3 steps in a row"),
    )
    assert checkpoint_steps(tmp_path / "d")


def test_shards_prepared_differently_are_not_overwritten(project: Path, tmp_path: Path) -> None:
    expect_failure(
        project, "--tokenizer.vocab_size=520", f"--train.run_dir={tmp_path}/v", parts=("tokenizer.vocab_size",)
    )


def test_no_gpu_where_one_was_asked_for(project: Path, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    expect_failure(project, "--launch.device=cuda", f"--train.run_dir={tmp_path}/g", parts=("launch.device",))


def on_two_ranks(folder: Path, config: Path, *arguments: tuple[str, ...], **variables: str) -> list[tuple[int, str]]:
    """(exit code, output) of two processes started by hand, each with arguments of its own; logs go into `folder`."""
    logs = [folder / f"{rank}.log" for rank in range(2)]
    for log in logs:
        log.unlink(missing_ok=True)
    commands = [train_command(1, "--config", str(config), *own) for own in arguments]
    return wait_for_ranks(start_ranks(commands, logs, **variables), logs)


def test_ranks_with_different_configurations_are_refused(project: Path, tmp_path: Path) -> None:
    run = f"--train.run_dir={tmp_path}/r"
    results = on_two_ranks(tmp_path, project, (run,), (run, "--schedule.peak=0.1"))
    assert [code for code, _ in results] == [2, 2], results
    together = "".join(output for _, output in results)
    assert_refused(together, 2, 2, "schedule.peak", "0.1", "0.002")
    assert together.count("error: ") == 1


def test_a_misspelt_key_on_two_ranks_is_said_once(project: Path, tmp_path: Path) -> None:
    for arguments in ((("--train.stepz=1",),) * 2, ((), ("--train.stepz=1",))):
        results = on_two_ranks(tmp_path, project, *arguments)
        assert [code for code, _ in results] == [2, 2], results
        together = "".join(output for _, output in results)
        assert_refused(together, 2, 2, "train.stepz")
        assert together.count("error: ") == 1


def test_ranks_that_cannot_be_are_refused_aloud(project: Path) -> None:
    for variables in ({"RANK": "5"}, {"WORLD_SIZE": "x"}, {"MASTER_PORT": ""}):
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        done = subprocess.run(
            train_command(1, "--config", str(project)),
            cwd=ROOT,
            env=clean_environment() | place | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert_refused(done.stderr, done.returncode, 2, "error: ", next(iter(variables)))


def test_lost_checkpoints_do_not_mean_starting_again(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    expect_failure(project, f"--train.run_dir={tmp_path}/run", code=1, parts=("reached step 6", "no checkpoint"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_run_without_its_configuration_is_compared_with_its_checkpoint(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "run", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    expect_failure(project, f"--train.run_dir={tmp_path}/run", "--train.seed=5", parts=("train.seed", "5"))


def test_weights_of_another_tokenizer_are_refused(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project.parent / "run" / "checkpoints" / "step_6", tmp_path / "other")
    model = tmp_path / "other" / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\n")
    manifest = read_manifest(tmp_path / "other")
    data = model.read_bytes()
    manifest.files["tokenizer.model"] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    (tmp_path / "other" / "COMPLETE").write_bytes(manifest_bytes(manifest.step, manifest.files))
    arguments = (f"--train.init_from={tmp_path}/other", f"--train.run_dir={tmp_path}/r")
    expect_failure(project, *arguments, parts=("another tokenizer",))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_no_checkpoint(project: Path, small_disk: Path) -> None:
    """A checkpoint takes 0.7 MB: some fit beside each other, then the disk is full."""
    run = small_disk / "run"
    common = (f"--train.run_dir={run}", "--train.validate_every=0", "--train.steps=60", "--log.tensorboard=false")
    expect_failure(project, *common, "--checkpoint.keep=9", code=1, parts=("no space left", "same command again"))
    steps = checkpoint_steps(run)
    assert steps
    assert not list((run / "checkpoints").glob("*.tmp"))
    shutil.rmtree(run / "checkpoints" / f"step_{steps[0]}")
    done = run_job(train_command(1, "--config", str(project), *common, "--checkpoint.keep=1"))
    assert done.returncode == 0, done.stdout
    assert f"resumed at step {steps[-1]}" in done.stdout


def test_a_full_disk_for_metrics_is_one_sentence(project: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3_000_000 - 60_000))
    common = (f"--train.run_dir={small_disk}/run", "--train.validate_every=0", "--checkpoint.every_steps=0")
    done = run_job(train_command(1, "--config", str(project), *common, "--train.steps=300"))
    assert_refused(done.stdout, done.returncode, 1, "no space left while writing metrics")


def test_scripts_without_arguments_they_need() -> None:
    done = run_job([sys.executable, "data_pipeline/browse.py"])
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
