"""A run on disk: its lock, its configuration, its environment, its DONE marker."""

import contextlib
import errno
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from data_pipeline.files import write_bytes_atomically
from dist_tfm.config.loading import config_to_yaml, forbidden_changes, read_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import ConfigError, InputError
from dist_tfm.metrics.writers import last_step

OWN_NAMES = frozenset(
    {"config.yaml", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints", "snapshots", "averaged"}
    | {"DONE", ".lock", "errors", "logs"}
)
PACKAGES = (
    "dist-tfm",
    "torch",
    "deepspeed",
    "accelerate",
    "sentencepiece",
    "numpy",
    "webdataset",
    "safetensors",
    "sacrebleu",
)


class RunDirectory:
    """Paths below runs/NAME, and the few files that are neither metrics nor checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.done = path / "DONE"
        self.lock = path / ".lock"

    def check(self, asked: Config) -> None:
        """Refuses a directory that holds something else, or a run that was configured differently.

        Raises InputError, ConfigError.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"train.run_dir={self.path}: expected a directory, found a file")
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise InputError(f"{self.checkpoints}: expected a directory, found a file: move it away")
        if not self.config.exists():
            names = {p.name for p in self.path.iterdir()} if self.path.exists() else set()
            foreign = sorted(name for name in names - OWN_NAMES if not name.endswith((".tmp", ".damaged")))
            if foreign:
                raise InputError(
                    f"train.run_dir={self.path} holds what is no run of this program ({', '.join(foreign[:3])}): "
                    "choose another directory or empty it"
                )
            return
        refuse_changes(self.path, read_config(self.config), asked)

    def lost_checkpoints(self) -> str | None:
        """Why a directory without any checkpoint must not start again at step 0; None if it may.

        A run that is done, or that has logged steps past its first checkpoint, had checkpoints: they were deleted, or
        the disk that holds them is not there.
        """
        reached = last_step(self.metrics)
        every = read_config(self.config).checkpoint.every_steps if self.config.exists() else 0
        if not self.done.exists() and not (every and reached > every):
            return None
        return (
            f"{self.path} has reached step {reached} but {self.checkpoints} holds no checkpoint: bring it back, or "
            "start a new run with another train.run_dir"
        )

    @contextlib.contextmanager
    def locked(self, patience: float = 60.0) -> Iterator[None]:
        """Holds .lock; a second run on the same directory waits `patience` seconds, then gives up with InputError.

        The lock is the operating system's: it ends with this process, however that ends, and no child inherits it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+")
        except OSError as fault:
            raise InputError(
                f"train.run_dir={self.path} cannot be used ({fault.strerror}): choose another directory"
            ) from None
        with file:
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as fault:
                    if fault.errno not in (errno.EAGAIN, errno.EACCES):
                        raise InputError(
                            f"train.run_dir={self.path}: its file system cannot lock files ({fault.strerror}), so two "
                            "runs could write there at once: choose a directory on another one"
                        ) from None
                    if time.monotonic() >= deadline:
                        raise InputError(
                            f"{self.path} is in use by another run (waited {patience:.0f} s): "
                            "stop it or choose another train.run_dir"
                        ) from None
                    time.sleep(0.2)
            yield

    def begin_attempt(self, config: Config, environment: Mapping[str, Any]) -> None:
        """Writes config.yaml and adds this attempt to environment.json; one that is not ours is moved aside."""
        write_text_atomically(self.config, config_to_yaml(config))
        attempts: list[object] = []
        if self.environment.exists():
            with contextlib.suppress(ValueError):
                found = json.loads(self.environment.read_text(encoding="utf-8"))
                attempts = found if isinstance(found, list) else []
            if not attempts:
                self.environment.replace(self.environment.with_name("environment.json.damaged"))
        write_text_atomically(self.environment, json.dumps([*attempts, environment], indent=1) + "\n")

    def mark_done(self, step: int) -> None:
        """Writes DONE: train.steps is reached."""
        write_text_atomically(self.done, f"{step}\n")

    def clear_done(self) -> None:
        """Training goes on past DONE."""
        self.done.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """The whole text or the old file, whatever happens meanwhile."""
    write_bytes_atomically(path, text.encode())


def refuse_changes(where: Path, saved: Config, asked: Config) -> None:
    """Raises ConfigError, with keys and both values, if a run saved with one configuration is asked to go on with
    another."""
    changes = forbidden_changes(saved, asked)
    if changes:
        lines = [
            f"  {key}: the run was started with {before!r}, now asked for {after!r}" for key, before, after in changes
        ]
        raise ConfigError(
            f"{where} cannot be resumed with another configuration:\n"
            + "\n".join(lines)
            + "\nuse the run's own values, or start a new run with another train.run_dir"
        )


def describe_environment(launcher: str, hosts: list[str], devices: list[str]) -> dict[str, Any]:
    """What an attempt ran on: one entry of environment.json."""
    import torch  # seconds, which those who only look at a run directory do not wait for

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "hosts": hosts,
        "devices": devices,
        "threads": torch.get_num_threads(),
        "launcher": launcher,
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, with `+` if it was changed; None outside of a git checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "") if commit.returncode == 0 else None
