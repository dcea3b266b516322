"""Starting, watching and killing real training jobs, as a user (or a cluster) would."""

import contextlib
import json
import lzma
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from tests.warm import SCRIPTS, Streams, WarmProcess, is_script, start_script

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "data_pipeline" / "corpora" / "swmsg_ende"
BIN = SCRIPTS
TIMINGS = frozenset({"tokens_per_second", "data_wait_fraction", "mfu", "memory_bytes"})


def clean_environment() -> dict[str, str]:
    """This process's variables, less those by which launchers and Slurm name ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "ACCELERATE_", "OMP_", "TORCHELASTIC", "CROSS_")
    return {k: v for k, v in os.environ.items() if not k.startswith(names)}


def head(name: str, count: int) -> str:
    """The first lines of a file of the embedded corpus."""
    with lzma.open(CORPUS / name, "rt", encoding="utf-8") as file:
        return "".join(line for line, _ in zip(file, range(count), strict=False))


def small_project(folder: Path, pairs: int = 300, valid: int = 24) -> Path:
    """A corpus of real pairs and a configuration that trains a very small model on it; returns the configuration."""
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text(head(f"train.{language}.xz", pairs), encoding="utf-8")
        (folder / f"valid.{language}").write_text(head(f"valid.{language}.xz", valid), encoding="utf-8")
    config = folder / "small.yaml"
    config.write_text(
        f"""
model: {{encoder_layers: 2, decoder_layers: 2, d_model: 32, d_ff: 64, heads: 4, dropout: 0.1, norm: pre}}
data:
  train_source: {folder}/train.en
  train_target: {folder}/train.de
  valid_source: {folder}/valid.en
  valid_target: {folder}/valid.de
  shards: {folder}/shards
  pairs_per_block: 64
  pairs_per_shard: 128
  batch_tokens: 400
  micro_batches: 2
tokenizer: {{vocab_size: 500}}
schedule: {{kind: inverse_sqrt, warmup: 20, peak: 2.0e-3}}
train: {{steps: 20, run_dir: {folder}/run, validate_every: 10}}
checkpoint: {{every_steps: 5}}
log: {{every_steps: 1}}
decode: {{valid_sentences: 8, show: 1, max_extra: 5}}
launch: {{device: cpu, threads: 1, hang_timeout: 120}}
"""
    )
    return config


def train_command(ranks: int, *arguments: str) -> list[str]:
    """The command line of a job on `ranks` processes of this machine."""
    script = str(ROOT / "dist_tfm" / "train.py")
    if ranks == 1:
        return [sys.executable, script, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, script, *arguments]


Job = subprocess.Popen[bytes] | WarmProcess


def run_job(
    command: Sequence[str], timeout: float = 240, cwd: Path = ROOT, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end; standard error goes into the output. cold: Python itself is started, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        job = start_job(command, output, cwd, cold)
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            raise AssertionError(f"not done in {timeout} s: {command}\n{output.read_text()[-3000:]}") from None
        return subprocess.CompletedProcess(list(command), code, output.read_text(encoding="utf-8"))


def start_job(
    command: Sequence[str],
    log: Path,
    cwd: Path = ROOT,
    cold: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """Starts a job in the background, its output appended to `log`. variables: added to its environment."""
    environment = clean_environment() | dict(variables)
    if is_script(command) and not cold:
        return start_script(command, cwd, environment, log)
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)


def start_program(command: Sequence[str], streams: Streams, cwd: Path = ROOT) -> WarmProcess:
    """Starts a program of Python whose standard streams are open files of this process."""
    return start_script(command, cwd, clean_environment(), streams)


def run_program(
    command: Sequence[str], text: bytes = b"", cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program of Python to its end, with `text` in a pipe as its standard input."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        job = start_program(command, Streams(reading, out.fileno(), errors.fileno()), cwd)
        os.close(reading)
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(text)
        try:
            code = job.wait(timeout)
        finally:
            job.kill()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), errors.read())


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(commands: Sequence[Sequence[str]], logs: Sequence[Path], **variables: str) -> list[Job]:
    """Starts one process a command, as ranks 0, 1, ... of one job, without a launcher. variables: added for all."""
    port = str(free_port())
    size = str(len(commands))
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    jobs = []
    for rank, (command, log) in enumerate(zip(commands, logs, strict=True)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        jobs.append(start_job(command, log, variables=shared | own | variables))
    return jobs


def run_ranks(ranks: int, folder: Path, *arguments: str, timeout: float = 240) -> list[tuple[int, str]]:
    """(exit code, output) of the ranks of a training job without a launcher; logs go into `folder`."""
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    for log in logs:
        log.unlink(missing_ok=True)
    return wait_for_ranks(start_ranks([train_command(1, *arguments)] * ranks, logs), logs, timeout)


def wait_for_ranks(jobs: Sequence[Job], logs: Sequence[Path], timeout: float = 120) -> list[tuple[int, str]]:
    """(exit code, output) of each; kills all if one is not done in `timeout` seconds."""
    try:
        codes = [job.wait(timeout) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(code, log.read_text(encoding="utf-8")) for code, log in zip(codes, logs, strict=True)]


def kill_job(job: Job) -> int:
    """SIGKILLs every process of a job at once (launcher, workers, their children); returns how many."""
    try:
        parent = psutil.Process(job.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=30)
    job.wait()
    return len(family)


def read_metrics(run: Path, timings: bool = False) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without the keys that measure time and memory."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
    return [{k: v for k, v in json.loads(line).items() if timings or k not in TIMINGS} for line in lines]


def training_lines(run: Path) -> list[dict[str, Any]]:
    """The training lines of metrics.jsonl, without timings."""
    return [line for line in read_metrics(run) if "valid_loss" not in line]


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that are there, ascending."""
    return sorted(int(p.name[5:]) for p in (run / "checkpoints").glob("step_*") if p.name[5:].isdigit())


def _changed_since(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except FileNotFoundError:  # not there yet, or renamed this very moment
        return False


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after the start, so many logged steps past the newest checkpoint, or so many
    seconds after a checkpoint has begun to be written."""

    kind: str
    value: float

    def wait(self, job: Job, run: Path, patience: float = 90) -> str:
        """Returns what came first: the moment, or the job's end."""
        started, started_at = time.monotonic(), time.time()
        target = (checkpoint_steps(run) or [0])[-1] + self.value
        while time.monotonic() - started < patience and job.poll() is None:
            passed = time.monotonic() - started
            if self.kind == "seconds" and passed >= self.value:
                return f"after {passed:.2f} s"
            if self.kind == "step" and _changed_since(run / "metrics.jsonl", started_at):
                lines = read_metrics(run)
                if lines and lines[-1]["step"] >= target:
                    return f"at step {lines[-1]['step']}"
            unfinished = (run / "checkpoints").glob("step_*.tmp")
            if self.kind == "checkpoint" and any(_changed_since(path, started_at) for path in unfinished):
                time.sleep(self.value)
                return f"{self.value * 1000:.1f} ms into writing a checkpoint"
            time.sleep(0.001 if self.kind == "checkpoint" else 0.01)
        return "after it had ended"
