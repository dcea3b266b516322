"""launch/accelerate/*.yaml: each that a CPU can run is run, two machines on this one included; the others are read."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.jobs import BIN, ROOT, checkpoint_steps, free_port, small_project, start_job, training_lines

FILES = ROOT / "launch" / "accelerate"


def accelerate(name: str, *options: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--config_file", str(FILES / name), *options, "dist_tfm/train.py"]


def test_term_to_accelerate_alone_stops_training_after_a_checkpoint(tmp_path: Path) -> None:
    """In its one-process mode accelerate hands no signal on: it ends, and training must notice."""
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = ("--config", str(small_project(tmp_path)), "--train.steps=100000", "--train.validate_every=0")
    job = start_job([*accelerate("cpu_1.yaml"), *arguments, "--checkpoint.every_steps=0"], log)
    try:
        deadline = time.monotonic() + 120
        while len(training_lines(run)) < 3 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(timeout=60) != 0, "accelerate itself was ended by the signal"
        deadline = time.monotonic() + 60
        while not checkpoint_steps(run) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        job.kill()
        job.wait()
    assert "SIGTERM: stopping at the next step boundary" in log.read_text()
    assert checkpoint_steps(run) == [training_lines(run)[-1]["step"]]
    assert training_lines(run)[-1]["world_size"] == 1


def test_two_machines_on_this_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("--config", str(small_project(tmp_path)), "--train.steps=2", "--train.validate_every=0")
    counts = ("--num_machines", "2", "--num_processes", "2")
    meeting = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    jobs = []
    for machine in ("0", "1"):
        command = accelerate("multi_node.yaml", *counts, *meeting, "--machine_rank", machine)
        jobs.append(start_job([*command, *arguments], tmp_path / f"{machine}.log"))
    try:
        codes = [job.wait(timeout=180) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert codes == [0, 0], (tmp_path / "0.log").read_text()
    assert [line["world_size"] for line in training_lines(run)] == [2, 2]
    attempt = json.loads((run / "environment.json").read_text())[0]
    assert attempt["launcher"] == "accelerate"
    assert len(attempt["hosts"]) == 2


@pytest.mark.parametrize(
    ("name", "processes", "machines", "kind"),
    [
        ("cpu_1", 1, 1, "NO"),
        ("cpu_2", 2, 1, "DEEPSPEED"),
        ("one_gpu", 1, 1, "NO"),
        ("one_node_8gpu", 8, 1, "DEEPSPEED"),
        ("multi_node", 32, 4, "DEEPSPEED"),
    ],
)
def test_accelerate_reads_every_file(name: str, processes: int, machines: int, kind: str) -> None:
    """Unknown keys, which accelerate refuses, are caught here also for the files that need GPUs."""
    read = load_config_from_file(str(FILES / f"{name}.yaml"))
    assert (read.num_processes, read.num_machines, read.distributed_type.value) == (processes, machines, kind)
    assert read.use_cpu == name.startswith("cpu")
    assert read.mixed_precision == "no", "the run's own configuration decides"


def test_there_is_no_other_file() -> None:
    assert {p.stem for p in FILES.glob("*.yaml")} == {"cpu_1", "cpu_2", "one_gpu", "one_node_8gpu", "multi_node"}
