"""Kills real training jobs at random moments and compares what they leave with an uninterrupted run.

    python tests/integration/torture.py --kills 20          # at length, on one rank and on two

A job is killed by SIGKILL to all its processes at once: while it imports, while it steps, while it writes a checkpoint.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.jobs import (
    Moment,
    checkpoint_steps,
    kill_job,
    read_metrics,
    run_ranks,
    small_project,
    start_job,
    train_command,
)


def moments(kills: int, seed: int) -> list[Moment]:
    """A third each during imports, at a step, and while a checkpoint is written, in an order drawn from `seed`."""
    draw = random.Random(seed)
    result = []
    for k in range(kills):
        kind = ("checkpoint", "seconds", "step")[k % 3]
        value = {
            "checkpoint": draw.uniform(0.0, 0.03),
            "seconds": draw.uniform(0.1, 6.0),
            "step": float(draw.randint(1, 12)),
        }[kind]
        result.append(Moment(kind, value))
    draw.shuffle(result)
    return result


@dataclass(frozen=True)
class Outcome:
    """expected, found: metrics, without what measures time and memory, of the uninterrupted run and of the killed one.
    killed: how many processes each kill ended. damaged: its checkpoints that claimed to be complete and were not."""

    expected: list[dict[str, Any]]
    found: list[dict[str, Any]]
    killed: list[int]
    done: bool
    damaged: list[str]

    def first_difference(self) -> str:
        """Empty if the metrics are equal, bit for bit."""
        for mine, theirs in itertools.zip_longest(self.found, self.expected):
            if mine != theirs:
                return f"expected {theirs}\nfound {mine}"
        return ""


def torture(folder: Path, ranks: int, kills: int, steps: int, seed: int) -> Outcome:
    """Trains without interruption, and again with kills; lines before a checkpoint must not be written again."""
    config = small_project(folder)
    common = ("--config", str(config), f"--train.steps={steps}")
    whole = run_ranks(ranks, folder, *common, f"--train.run_dir={folder}/whole")
    assert [code for code, _ in whole] == [0] * ranks, whole
    expected = read_metrics(folder / "whole")
    assert max(line["epoch"] for line in expected) >= 2, "the run must go into epoch 2"
    run, log = folder / "killed", folder / "killed.log"
    command = train_command(ranks, *common, f"--train.run_dir={run}")
    killed = []
    for number, moment in enumerate(moments(kills, seed)):
        prefix, inode = safe_prefix(run)
        job = start_job(command, log, cold=moment.kind == "seconds")
        try:
            when = moment.wait(job, run)
        finally:
            killed.append(kill_job(job))
        reached = read_metrics(run)[-1]["step"] if read_metrics(run) else 0
        print(f"ranks {ranks} kill {number + 1}: {when} ({killed[-1]} processes, step {reached})", flush=True)
        check_prefix(run, prefix, inode)
    prefix, inode = safe_prefix(run)
    last = run_ranks(ranks, folder, *common, f"--train.run_dir={run}")
    assert [code for code, _ in last] == [0] * ranks, (last, log.read_text())
    check_prefix(run, prefix, inode)
    damaged = [path.name for path in (run / "checkpoints").glob("*.damaged*")]
    return Outcome(expected, read_metrics(run), killed, (run / "DONE").exists(), damaged)


def safe_prefix(run: Path) -> tuple[bytes, int | None]:
    """The bytes of metrics.jsonl up to the newest checkpoint, which no later attempt may write again, and its inode."""
    steps, path = checkpoint_steps(run), run / "metrics.jsonl"
    if not steps or not path.exists():
        return b"", None
    data, keep = path.read_bytes(), len([x for x in read_metrics(run) if x["step"] <= steps[-1]])
    return b"".join(data.splitlines(keepends=True)[:keep]), path.stat().st_ino


def check_prefix(run: Path, prefix: bytes, inode: int | None) -> None:
    """Lines before a checkpoint were not written again."""
    if inode is not None:
        path = run / "metrics.jsonl"
        assert path.stat().st_ino == inode, "metrics.jsonl was replaced instead of cut back in place"
        assert path.read_bytes().startswith(prefix), "lines before a checkpoint were changed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(3)), help="drawn, and printed, if not given"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            outcome = torture(Path(folder), ranks, options.kills, options.steps, options.seed + ranks)
        assert not outcome.first_difference(), outcome.first_difference()
        assert outcome.done, "the last attempt did not finish"
        assert not outcome.damaged, f"kills left checkpoints that claim to be complete: {outcome.damaged}"
        print(f"ranks {ranks}: {options.kills} kills, metrics equal the uninterrupted run's", flush=True)


if __name__ == "__main__":
    main()
