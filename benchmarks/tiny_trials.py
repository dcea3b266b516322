"""How `configs/tiny.yaml` came to be: one thing changed at a time, scored on validation pairs, never on the test set.

Each trial is a run of dist_tfm/train.py with other keys, the average of its last snapshots, and beam 4 over the 400
validation pairs; what it cost is counted in seconds of processor, which a busy machine disturbs less than the clock.

    python benchmarks/tiny_trials.py --json benchmarks/results/tiny_trials.json
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.harness import ROOT, Recorder, add_common_options, finish, positive, say, start_recording, write_rows
from data_pipeline.errors import RunError
from data_pipeline.settings import run_main

TRIALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tiny": (),
        "dropout-0.1": ("--model.dropout=0.1",),
        "batch-tokens-1500": ("--data.batch_tokens=1500",),
        "peak-1e-3": ("--schedule.peak=1e-3",),
        "peak-3e-3": ("--schedule.peak=3e-3",),
        "post-norm": ("--model.norm=post",),
        "layers-3-and-3": ("--model.encoder_layers=3", "--model.decoder_layers=3"),
        "d_ff-1024": ("--model.d_ff=1024",),
        "vocabulary-8000": ("--tokenizer.vocab_size=8000",),
    }
)
"""What each trial changes in the configuration."""

AVERAGED = 5
DEV = ("embedded:swmsg_ende/valid.en.xz", "embedded:swmsg_ende/valid.de.xz")


class Trial(NamedTuple):
    """What one trial came to: BLEU on the validation pairs, and seconds of processor for its training."""

    bleu: float
    newest_bleu: float
    seconds: float


def main(argv: Sequence[str]) -> int:
    """The program; returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(prog="tiny_trials.py", description=__doc__, formatter_class=_Raw)
    add_common_options(parser)
    parser.add_argument(
        "--steps", type=positive, default=1000, metavar="N", help="training steps of each (default 1000)"
    )
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=[*TRIALS], help="these trials alone")
    options = parser.parse_args(list(argv))
    steps = 10 if options.quick else options.steps
    recorder = start_recording("tiny_trials.py", argv)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            say(f"{name}: {steps} steps")
            _record(recorder, name, run_trial(Path(folder) / name, TRIALS[name], steps, options.threads))
            if options.json is not None:
                write_rows(options.json, recorder.rows)  # an hour's rows outlive a run that is ended early
    return finish(recorder, options.json)


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def _record(recorder: Recorder, name: str, trial: Trial) -> None:
    recorder.add(f"bleu-{name}", trial.bleu, "BLEU")
    recorder.add(f"newest-bleu-{name}", trial.newest_bleu, "BLEU")
    recorder.add(f"processor-{name}", trial.seconds, "s")


def run_trial(folder: Path, overrides: Sequence[str], steps: int, threads: int) -> Trial:
    """Trains with `overrides` for `steps` steps on `threads` threads in `folder`, and scores. Raises RunError."""
    run = folder / "run"
    every = max(1, min(100, steps // AVERAGED))
    intervals = ["--train.validate_every=0", f"--checkpoint.snapshot_every={every}", "--log.every_steps=100"]
    place = [f"--train.run_dir={run}", f"--data.shards={folder / 'shards'}", "--log.tensorboard=false"]
    threading = f"--launch.threads={threads}"
    _program("prepare", *place, *overrides)
    seconds = _program("train", *overrides, *place, *intervals, f"--train.steps={steps}", threading)
    _program("average", str(run), "--last", str(AVERAGED))
    return Trial(_dev_bleu(run / "averaged", folder, threading), _dev_bleu(run, folder, threading), seconds)


def _dev_bleu(checkpoint: Path, folder: Path, threading: str) -> float:
    report = folder / "report.json"
    texts = ["--source", DEV[0], "--reference", DEV[1], "--json", str(report)]
    _program("evaluate", "--checkpoint", str(checkpoint), *texts, "--decode.beam=4", threading)
    scores = json.loads(report.read_text(encoding="utf-8"))["scores"]
    return float(next(score["value"] for score in scores if score["name"] == "BLEU"))


def _program(name: str, *arguments: str) -> float:
    """Runs one of the project's programs; its seconds of processor. Raises RunError with its last words."""
    folder = "data_pipeline" if name == "prepare" else "dist_tfm"
    command = [sys.executable, str(ROOT / folder / f"{name}.py"), *arguments]
    before = os.times()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    after = os.times()
    if done.returncode != 0:
        raise RunError(f"{shlex.join(command)} ended with {done.returncode}: {done.stdout[-1000:]}")
    return after.children_user - before.children_user + after.children_system - before.children_system


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
