"""Data, training and evaluation as Slurm jobs that wait for each other: `dist-tfm submit --config configs/X.yaml`.

Every job is one of the scripts in slurm/, submitted by sbatch as a user would; --dry-run prints the lines.
"""

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.command_line import parse_command_line
from data_pipeline.prepare import is_prepared
from data_pipeline.remote import is_remote
from data_pipeline.settings import split_overrides
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import ConfigError, RunError

DESCRIPTION = """Submits what a run needs as Slurm jobs, each after the one before has succeeded: shards (if they are
missing: three jobs, the second a job array), training, evaluation. Keys of the configuration go to all that know their
section. Call it where the checkout is, or set DIST_TFM_HOME.
Exit codes: 0 submitted, 1 sbatch refused, 2 configuration or input."""

DATA_SECTIONS = ("data.", "tokenizer.")
DECODING_SECTIONS = ("decode.", "launch.")


@dataclass(frozen=True)
class Job:
    """One call of sbatch. name: of a shell variable for its number; after: the name of the job that it waits for."""

    name: str
    script: str
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    after: str | None = None

    def words(self, home: Path, waits_for: str | None) -> list[str]:
        """The command. waits_for: the number of the job named `after`."""
        # Without the second option a job that waits for a failed one stays in the queue for ever.
        chain = [f"--dependency=afterok:{waits_for}", "--kill-on-invalid-dep=yes"] if waits_for else []
        return ["sbatch", "--parsable", *chain, *self.options, str(home / "slurm" / self.script), *self.arguments]


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    sections, options = parse_command_line(
        "submit", DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    config = make_config(sections)
    home = Path(os.environ.get("DIST_TFM_HOME", "."))
    script = home / "slurm" / options.script
    if not script.is_file():
        raise ConfigError(
            f"{script} not found: call this where the checkout is or set DIST_TFM_HOME; --script names a file of slurm/"
        )
    overrides, _ = split_overrides(argv)
    jobs = plan(config, options, overrides)
    if options.dry_run:
        for line in as_shell(jobs, home):
            print(line)
        return 0
    for name, number in submit(jobs, home).items():
        print(f"{name} {number}")
    return 0


def plan(config: Config, options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> list[Job]:
    """The jobs in their order, each after the one before."""
    chosen = ("--config", options.config)
    jobs: list[Job] = []
    own = not config.data.corpora and not is_remote(config.data.shards)  # shards that prepare.py makes
    if own and not is_prepared(config.data, config.tokenizer):
        jobs += _preparation((*chosen, *_as_arguments(overrides, DATA_SECTIONS)), options.prepare_tasks)
    sbatch = tuple(shlex.split(options.sbatch))
    after = jobs[-1].name if jobs else None
    jobs.append(Job("train", options.script, (*chosen, *_as_arguments(overrides)), sbatch, after))
    if options.evaluate:
        arguments = (config.train.run_dir, *shlex.split(options.evaluate), *_as_arguments(overrides, DECODING_SECTIONS))
        jobs.append(Job("evaluate", "evaluate.sbatch", arguments, after="train"))
    return jobs


def _preparation(arguments: tuple[str, ...], tasks: int) -> list[Job]:
    if tasks == 1:
        return [Job("prepare", "prepare_data.sbatch", arguments)]
    return [
        Job("tokenizer", "prepare_data.sbatch", (*arguments, "--stage", "tokenizer")),
        Job("shards", "prepare_data.sbatch", arguments, (f"--array=0-{tasks - 1}",), after="tokenizer"),
        Job("finish", "prepare_data.sbatch", (*arguments, "--stage", "finish"), after="shards"),
    ]


def as_shell(jobs: Sequence[Job], home: Path) -> list[str]:
    """The jobs as lines that a shell would run."""
    lines = []
    for job in jobs:
        mark = "WAITS_FOR"
        words = shlex.join(job.words(home, mark if job.after else None))
        lines.append(f"{job.name}=$({words.replace(mark, f'${job.after}')})")
    return lines


def submit(jobs: Sequence[Job], home: Path) -> dict[str, str]:
    """Runs sbatch for each; their numbers. Raises RunError if sbatch refuses one: those before it are cancelled."""
    if shutil.which("sbatch") is None:
        raise RunError("sbatch not found: call this on a login node of a Slurm cluster, or use --dry-run")
    numbers: dict[str, str] = {}
    for job in jobs:
        words = job.words(home, numbers[job.after] if job.after else None)
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            if numbers:
                subprocess.run(["scancel", *numbers.values()], capture_output=True)
            raise RunError(
                f"sbatch refused `{shlex.join(words)}` ({done.stderr.strip()}); nothing is left in the queue"
            )
        numbers[job.name] = done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several clusters
    return numbers


def _as_arguments(overrides: Sequence[tuple[str, str]], sections: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    return tuple(f"--{key}={value}" for key, value in overrides if key.startswith(sections))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--script", default="big_enfr.sbatch", metavar="FILE", help="of slurm/, for training (default big_enfr.sbatch)"
    )
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="further options for training's sbatch, in one word"
    )
    parser.add_argument(
        "--prepare-tasks", type=_tasks, default=8, metavar="N", help="tasks that make missing shards (default 8)"
    )
    parser.add_argument(
        "--evaluate", default="", metavar="OPTIONS", help="score the run: options of evaluate.py, in one word"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch lines and submit nothing")


def _tasks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of tasks from 1, found {text!r}")
    return int(text)
