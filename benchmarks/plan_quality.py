"""How well micro-batches are filled, and how random their order is: `python benchmarks/plan_quality.py`.

The corpora are real ones, of which `benchmarks/lengths` holds the lengths alone. Each is planned as training plans it,
block by block, into whole epochs of one window a lane.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT, Recorder, add_common_options, finish, positive, start_recording
from data_pipeline.api import DataConfig
from data_pipeline.npy import decode_npy
from data_pipeline.plan import Plan, cut_window, plan_window, window_blocks
from data_pipeline.settings import run_main

SCRIPT = Path(__file__).name
SEED = 1
MICRO_BATCHES = 8
BUDGETS = (1024, 3125, 8192, 25_000)
"""Micro-batch budgets, padded tokens a side; 3,125 is that of the recipes (25,000 tokens in 8 micro-batches)."""
RECIPE = 3125
LANES = (2, 8)
FOLDER = ROOT / "benchmarks" / "lengths"
CORPORA = ("medium_ende", "medium_enfr")


def corpus_lengths(name: str) -> NDArray[np.int64]:
    """[pairs, 2] (source, target) of a corpus, EOS included, in a random order as preparation makes it."""
    table = decode_npy((FOLDER / f"{name}.npy").read_bytes(), dimensions=2).astype(np.int64)
    pairs = np.repeat(table[:, :2] + 1, table[:, 2], axis=0)
    return np.random.default_rng(SEED).permutation(pairs)


@dataclasses.dataclass(frozen=True)
class Quality:
    """padding: share of cells without a token. fill: real tokens of the larger side over the budget. useful: real
    tokens over what both sides could hold. correlation: of the mean lengths of consecutive steps."""

    padding: float
    fill: float
    useful: float
    correlation: float


def quality(lengths: NDArray[np.int64], plans: Sequence[Plan]) -> Quality:
    """Of the plans of all lanes of one window together; lengths [pairs, 2] of each plan are those of its own rows."""
    tokens = np.array([plan.tokens for plan in plans]).sum(axis=0)
    cells = sum(int(plan.cells.sum()) for plan in plans)
    room = sum(plan.budget * len(plan.source_widths) for plan in plans)
    return Quality(
        padding=1 - tokens.sum() / cells,
        fill=tokens.max() / room,
        useful=tokens.sum() / (2 * room),
        correlation=step_correlation(lengths, plans[0]),
    )


def step_correlation(lengths: NDArray[np.int64], plan: Plan) -> float:
    """Correlation of the mean lengths (both sides) of consecutive steps of a plan, whose rows index `lengths`."""
    starts = plan.offsets[:: plan.micro_batches]
    totals = np.concatenate(([0], np.cumsum(lengths.sum(axis=1)[plan.rows])))[starts]
    means = np.diff(totals) / np.diff(starts)
    return float(np.corrcoef(means[:-1], means[1:])[0, 1])


def plan_lanes(lengths: NDArray[np.int64], budget: int, lanes: int) -> tuple[list[NDArray[np.int64]], list[Plan]]:
    """(pairs of each lane, plan of each lane) of an epoch, one window a lane, lanes ending together."""
    size = DataConfig().pairs_per_block
    starts = np.arange(0, len(lengths), size)
    blocks = np.diff(np.append(starts, len(lengths)))
    (window,) = window_blocks(blocks, len(lengths), lanes, SEED, 0)
    pairs = [np.concatenate([lengths[starts[b] : starts[b] + blocks[b]] for b in lane]) for lane in window]
    cuts = [cut_window(p[:, 0], p[:, 1], budget, (SEED, 0, 0, lane)) for lane, p in enumerate(pairs)]
    steps = max(cut.steps(MICRO_BATCHES // lanes) for cut in cuts)
    return pairs, [cut.plan(MICRO_BATCHES // lanes, steps) for cut in cuts]


def record_corpus(name: str, lengths: NDArray[np.int64], rounds: int, recorder: Recorder) -> None:
    """Rows of one corpus: by budget as one window, then by lanes at the recipes' budget."""
    for budget in BUDGETS:
        seconds = []
        for window in range(rounds):
            started = time.perf_counter()
            plan = plan_window(lengths[:, 0], lengths[:, 1], budget, MICRO_BATCHES, (SEED, 0, window))
            seconds.append(time.perf_counter() - started)
        _record(f"{name}-{budget}", quality(lengths, [plan]), recorder)
        recorder.add(f"planning-{name}-{budget}", len(lengths) / statistics.median(seconds), "pairs/s")
    for lanes in LANES:
        pairs, plans = plan_lanes(lengths, RECIPE, lanes)
        _record(f"{name}-{RECIPE}-lanes-{lanes}", quality(pairs[0], plans), recorder)


def _record(name: str, found: Quality, recorder: Recorder) -> None:
    recorder.add(f"padding-{name}", found.padding, "fraction")
    recorder.add(f"fill-{name}", found.fill, "fraction")
    recorder.add(f"useful-{name}", found.useful, "fraction")
    recorder.add(f"correlation-{name}", found.correlation, "of 1")


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").partition("\n")[0])
    add_common_options(parser)
    parser.add_argument("--rounds", type=positive, metavar="N", help="measurements of each time (default 5)")
    options = parser.parse_args(list(argv))
    recorder = start_recording(SCRIPT, argv)
    for name in CORPORA:
        lengths = corpus_lengths(name)
        record_corpus(name, lengths[:40_000] if options.quick else lengths, options.rounds or 5, recorder)
    return finish(recorder, options.json)


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
