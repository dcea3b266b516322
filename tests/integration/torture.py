"""Kills real training jobs at random moments and compares what they leave with an uninterrupted run.

    python tests/integration/torture.py --kills 20          # at length, on one rank and on two

A job is killed by SIGKILL to all its processes at once: while it imports, while it steps, while it writes a checkpoint.
"""

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.jobs import (
    Moment,
    checkpoint_steps,
    kill_job,
    read_metrics,
    run_job,
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


def torture(folder: Path, ranks: int, kills: int, steps: int, seed: int) -> None:
    """Raises AssertionError unless the killed run's metrics equal the uninterrupted run's, bit for bit."""
    config = small_project(folder)
    common = ("--config", str(config), f"--train.steps={steps}")
    whole = run_job(train_command(ranks, *common, f"--train.run_dir={folder}/whole"))
    assert whole.returncode == 0, whole.stdout
    expected = read_metrics(folder / "whole")
    assert max(line["epoch"] for line in expected) >= 2, "the run must go into epoch 2"
    run, log = folder / "killed", folder / "killed.log"
    command = train_command(ranks, *common, f"--train.run_dir={run}")
    for number, moment in enumerate(moments(kills, seed)):
        prefix, inode = safe_prefix(run)
        job = start_job(command, log, cold=True)
        try:
            when = moment.wait(job, run)
        finally:
            processes = kill_job(job)
        reached = read_metrics(run)[-1]["step"] if read_metrics(run) else 0
        print(f"ranks {ranks} kill {number + 1}: {when} ({processes} processes, step {reached})", flush=True)
        check_prefix(run, prefix, inode)
    prefix, inode = safe_prefix(run)
    last = run_job(command)
    assert last.returncode == 0, last.stdout + log.read_text()
    check_prefix(run, prefix, inode)
    found = read_metrics(run)
    for mine, theirs in zip(found, expected, strict=False):
        assert mine == theirs, f"first difference at step {theirs['step']}:\n{mine}\n{theirs}"
    assert len(found) == len(expected)
    assert (run / "DONE").exists()
    assert not list((run / "checkpoints").glob("*.damaged*")), "a kill left a checkpoint that claims to be complete"


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
            torture(Path(folder), ranks, options.kills, options.steps, options.seed + ranks)
        print(f"ranks {ranks}: {options.kills} kills, metrics equal the uninterrupted run's", flush=True)


if __name__ == "__main__":
    main()
