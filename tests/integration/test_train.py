"""train.py as users run it: launchers, resume, signals, dry run."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.jobs import (
    BIN,
    ROOT,
    checkpoint_steps,
    clean_environment,
    free_port,
    read_metrics,
    run_job,
    small_project,
    start_job,
    start_ranks,
    train_command,
    training_lines,
)

REQUIRED = (
    "step epoch loss nll ppl lr grad_norm source_tokens target_tokens tokens_per_second padding_fraction "
    "data_wait_fraction mfu memory_bytes skipped_steps world_size"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project whose shards are prepared once; returns its configuration."""
    config = small_project(tmp_path_factory.mktemp("project"))
    done = run_job([sys.executable, "data_pipeline/prepare.py", "--config", str(config)])
    assert done.returncode == 0, done.stdout
    return config


def test_twenty_steps_then_forty_then_finished(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "x"
    common = ("--config", str(project), f"--train.run_dir={run}")
    first = run_job([sys.executable, "-X", "importtime", *train_command(1, *common, "--train.steps=20")[1:]])
    assert first.returncode == 0, first.stdout
    assert "deepspeed.runtime.zero.muon.muon_optimizer" in first.stdout, "its functions are marked for a compiler"
    assert "torch._inductor.compile_fx" not in first.stdout, "a compiler was loaded, and nothing is compiled"
    for step in (10, 20):
        assert f"held-out samples at step {step}:\n  source      " in first.stdout
    assert (run / "DONE").read_text() == "20\n"
    second = run_job(train_command(1, *common, "--train.steps=40"))
    assert second.returncode == 0, second.stdout
    assert "resumed at step 20" in second.stdout
    third = run_job(train_command(1, *common, "--train.steps=40"))
    assert third.returncode == 0
    assert "finished" in third.stdout
    assert "--train.steps=80" in third.stdout
    lines = training_lines(run)
    assert [line["step"] for line in lines] == list(range(1, 41))
    full = read_metrics(run, timings=True)
    assert all(set(line) >= set(REQUIRED.split()) for line in full if "valid_loss" not in line)
    valid = [line for line in full if "valid_loss" in line]
    assert [line["step"] for line in valid] == [10, 20, 30, 40]
    assert all({"valid_loss", "valid_nll", "valid_bleu"} <= set(line) and line["valid_pairs"] == 24 for line in valid)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3, "it learns"
    assert len(json.loads((run / "environment.json").read_text())) == 2
    assert (run / "config.yaml").exists()
    assert checkpoint_steps(run)[-1] == 40
    check_tensorboard(run, steps=40)


def check_tensorboard(run: Path, steps: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, steps + 1))
    assert [e.step for e in events.Scalars("valid/bleu")] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["accelerate", "launch", "--use_deepspeed", "--num_processes", "2"], id="accelerate"),
        pytest.param(["deepspeed", "--num_gpus", "2"], id="deepspeed"),
    ],
)
def test_two_processes_by_every_launcher(command: list[str], project: Path, tmp_path: Path) -> None:
    """torchrun, and accelerate without --use_deepspeed, which starts one process, are in test_readme.py."""
    run = tmp_path / "two"
    port = str(free_port())
    options = {"accelerate": ["--main_process_port", port], "deepspeed": ["--master_port", port]}
    done = run_job(
        [str(BIN / command[0]), *command[1:], *options[command[0]], "dist_tfm/train.py", "--config", str(project)]
        + ["--parallel.zero_stage=2", "--train.steps=3", "--train.validate_every=3", f"--train.run_dir={run}"]
    )
    assert done.returncode == 0, done.stdout
    lines = read_metrics(run)
    assert [line["world_size"] for line in lines if "world_size" in line] == [2, 2, 2]
    assert {line["zero_stage"] for line in lines if "zero_stage" in line} == {2}
    assert [line["valid_pairs"] for line in lines if "valid_loss" in line] == [24], "no pair twice, none left out"
    launcher = json.loads((run / "environment.json").read_text())[0]["launcher"]
    assert launcher == command[0]


def test_the_variables_of_slurm_start_two_tasks(project: Path, tmp_path: Path) -> None:
    run, port = tmp_path / "slurm", str(free_port())
    jobs = []
    for rank in range(2):
        variables = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS_PER_NODE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = train_command(1, "--config", str(project), "--train.steps=2", f"--train.run_dir={run}")
        jobs.append(start_job(command, tmp_path / f"log.{rank}", variables=variables))
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    assert training_lines(run)[-1]["world_size"] == 2
    assert json.loads((run / "environment.json").read_text())[0]["launcher"] == "slurm"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_at_a_step_boundary_after_a_checkpoint(number: int, project: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    command = train_command(1, "--config", str(project), f"--train.run_dir={run}", "--train.steps=100000")
    job = start_job([*command, "--checkpoint.every_steps=0", "--train.validate_every=0"], log)
    try:
        deadline = time.monotonic() + 90
        while len(training_lines(run)) < 3 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(number)
        assert job.wait(timeout=60) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    assert signal.Signals(number).name in log.read_text()
    assert checkpoint_steps(run) == [training_lines(run)[-1]["step"]]
    assert not (run / "DONE").exists()


def test_a_dry_run_reports_memory_and_speed_and_leaves_nothing(tmp_path: Path) -> None:
    config = small_project(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = run_job(train_command(1, "--config", str(config), "--dry-run"))
    assert done.returncode == 0, done.stdout
    said = re.search(r"no complete shards .*: the whole corpus is prepared into (\S+), a temporary folder", done.stdout)
    assert said is not None, done.stdout
    assert not Path(said[1]).exists()
    assert done.stdout.index(said[0]) < done.stdout.index("training the tokenizer"), "said before it is done"
    assert done.stdout.splitlines()[-1] == "dry run passed; nothing was kept"
    steps = re.findall(
        r"^largest training step \((.+)\): .* (\d+) source and (\d+) target positions: .*tokens/s", done.stdout, re.M
    )
    assert [kind for kind, *_ in steps] == ["most positions", "longest pairs"]
    shorter, longer = (max(int(source), int(target)) for _, source, target in steps)
    assert shorter < longer
    assert re.search(r"^peak of resident memory of a process: [\d,]+ MiB$", done.stdout, re.M)
    assert "largest validation batch" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_of_another_run_start_a_new_one(project: Path, tmp_path: Path) -> None:
    common = ("--config", str(project), "--train.validate_every=0", "--model.dropout=0")
    first = run_job(train_command(1, *common, "--train.steps=6", f"--train.run_dir={tmp_path}/a"))
    assert first.returncode == 0, first.stdout
    second = run_job(
        train_command(1, *common, "--train.steps=1", f"--train.run_dir={tmp_path}/b", f"--train.init_from={tmp_path}/a")
    )
    assert second.returncode == 0, second.stdout
    start, resumed = training_lines(tmp_path / "a"), training_lines(tmp_path / "b")
    assert resumed[0]["step"] == 1
    assert resumed[0]["lr"] == start[0]["lr"], "the schedule starts anew"
    assert resumed[0]["pair_hash"] == start[0]["pair_hash"], "and so do the data"
    assert resumed[0]["loss"] < start[0]["loss"] - 0.02, "but the weights do not"


def test_help_and_print_config_of_every_program() -> None:
    for script in ("dist_tfm/train.py", "data_pipeline/prepare.py", "data_pipeline/browse.py"):
        shown = run_job([sys.executable, script, "--help"], cold=True)
        assert shown.returncode == 0, shown.stdout
        assert "usage" in shown.stdout
    verbs = run_job([str(BIN / "dist-tfm"), "--help"])
    assert verbs.returncode == 0
    assert {"train", "prepare", "browse"} <= set(verbs.stdout.split())
    printed = run_job([str(BIN / "dist-tfm"), "train", "--print-config", "--train.seed=77"])
    assert printed.returncode == 0
    assert "seed: 77" in printed.stdout
    assert run_job([str(BIN / "dist-tfm"), "fly"]).returncode == 2


def test_two_runs_in_one_directory_do_not_mix(project: Path, tmp_path: Path) -> None:
    """The second one waits for the first one's lock, then goes on from where that ended."""
    run, log = tmp_path / "run", tmp_path / "log"
    common = ("--config", str(project), f"--train.run_dir={run}", "--train.validate_every=0")
    first = start_job(train_command(1, *common, "--train.steps=12"), log)
    second = start_job(train_command(1, *common, "--train.steps=12"), tmp_path / "log2")
    assert [first.wait(timeout=120), second.wait(timeout=120)] == [0, 0]
    assert [line["step"] for line in training_lines(run)] == list(range(1, 13))


def test_the_default_run_is_the_tiny_configuration() -> None:
    printed = run_job([sys.executable, "dist_tfm/train.py", "--print-config"])
    assert "run_dir: runs/tiny" in printed.stdout
    assert os.path.exists(ROOT / "configs" / "tiny.yaml")


def test_a_terminal_gets_a_bar_and_a_log_gets_plain_lines(project: Path, tmp_path: Path) -> None:
    def output(terminal: bool) -> str:
        run = tmp_path / str(terminal)
        command = train_command(1, "--config", str(project), "--train.steps=3", f"--train.run_dir={run}")
        if not terminal:
            return run_job(command).stdout
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        job = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=slave, stderr=slave)
        os.close(slave)
        chunks = []
        try:
            while chunk := os.read(master, 4096):
                chunks.append(chunk)
        except OSError:  # what reading gives once the last writer has gone
            pass
        assert job.wait(timeout=60) == 0
        os.close(master)
        return b"".join(chunks).decode()

    log, screen = output(terminal=False), output(terminal=True)
    assert "step 3 epoch 1: loss" in log
    assert "\r" not in log
    assert re.search(r"3/3 .*loss", screen)
    assert "\r" in screen


def test_a_killed_rank_ends_the_other_with_one_sentence(project: Path, tmp_path: Path) -> None:
    run, logs = tmp_path / "run", [tmp_path / "0.log", tmp_path / "1.log"]
    command = train_command(1, "--config", str(project), f"--train.run_dir={run}", "--train.steps=100000")
    jobs = start_ranks([command] * 2, logs)
    try:
        deadline = time.monotonic() + 120
        while len(training_lines(run)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        jobs[1].kill()
        assert jobs[0].wait(timeout=60) == 1
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert "error: rank 0 lost another process of the job" in logs[0].read_text()
    assert "Traceback" not in logs[0].read_text()
