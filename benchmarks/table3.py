"""Table 3 of Vaswani et al. 2017, scaled down: its rows, an eighth as wide, on the embedded corpus of program messages.

Every row is trained anew for each seed, at one rate and for as many steps as all others; perplexity is per piece of the
held-out pairs, BLEU that of greedy translations. So short a training ranks what learns fast, not what learns most: the
columns of the paper stand beside, for their signs, not their sizes. Rows: ppl-ROW, ppl-spread-ROW (standard deviation
over seeds), bleu-ROW, bleu-spread-ROW, parameters-ROW.

    python benchmarks/table3.py --json benchmarks/results/table3.json
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.harness import Recorder, add_common_options, finish, positive, say, start_recording, write_rows
from data_pipeline.errors import RunError
from data_pipeline.settings import run_main

BASE: Mapping[str, str] = MappingProxyType(
    {
        **{"model.encoder_layers": "2", "model.decoder_layers": "2", "model.d_model": "64", "model.d_ff": "256"},
        **{"model.heads": "4", "model.d_k": "16", "model.d_v": "16", "model.dropout": "0.1", "model.norm": "post"},
        **{"tokenizer.vocab_size": "1000", "data.batch_tokens": "1500", "data.micro_batches": "1"},
        **{"schedule.kind": "inverse_sqrt", "schedule.warmup": "100", "schedule.peak": "3e-3"},
        **{"optim.clip_norm": "0", "train.label_smoothing": "0.1"},
    }
)
"""The paper's base, an eighth as wide and a third as deep, with half its heads, each a quarter as wide."""


class RowOfTable(NamedTuple):
    """What a row changes of BASE; the paper's perplexity and BLEU for its own row."""

    keys: dict[str, str]
    perplexity: float
    bleu: float


def _heads(heads: int) -> dict[str, str]:
    return {"model.heads": str(heads), "model.d_k": str(64 // heads), "model.d_v": str(64 // heads)}


def _layers(layers: int) -> dict[str, str]:
    return {"model.encoder_layers": str(layers), "model.decoder_layers": str(layers)}


def _width(width: int) -> dict[str, str]:
    return {"model.d_model": str(width), "model.d_k": str(width // 4), "model.d_v": str(width // 4)}


ROWS: Mapping[str, RowOfTable] = MappingProxyType(
    {
        "base": RowOfTable({}, 4.92, 25.8),
        "a-1-head": RowOfTable(_heads(1), 5.29, 24.9),
        "a-2-heads": RowOfTable(_heads(2), 5.00, 25.5),
        "a-8-heads": RowOfTable(_heads(8), 4.91, 25.8),
        "a-16-heads": RowOfTable(_heads(16), 5.01, 25.4),
        "b-d_k-4": RowOfTable({"model.d_k": "4"}, 5.16, 25.1),
        "b-d_k-8": RowOfTable({"model.d_k": "8"}, 5.01, 25.4),
        "c-1-layer": RowOfTable(_layers(1), 6.11, 23.7),
        "c-3-layers": RowOfTable(_layers(3), 4.88, 25.5),
        "c-d_model-32": RowOfTable(_width(32), 5.75, 24.5),
        "c-d_model-128": RowOfTable(_width(128), 4.66, 26.0),
        "c-d_ff-128": RowOfTable({"model.d_ff": "128"}, 5.12, 25.4),
        "c-d_ff-512": RowOfTable({"model.d_ff": "512"}, 4.75, 26.2),
        "d-dropout-0.0": RowOfTable({"model.dropout": "0.0"}, 5.77, 24.6),
        "d-dropout-0.2": RowOfTable({"model.dropout": "0.2"}, 4.95, 25.5),
        "d-smoothing-0.0": RowOfTable({"train.label_smoothing": "0.0"}, 4.67, 25.3),
        "d-smoothing-0.2": RowOfTable({"train.label_smoothing": "0.2"}, 5.47, 25.7),
        "e-learned": RowOfTable({"model.positions": "learned", "model.max_positions": "256"}, 4.92, 25.7),
        "big": RowOfTable({**_width(128), "model.d_ff": "512", "model.heads": "8", "model.dropout": "0.3"}, 4.33, 26.4),
    }
)
"""The paper's row with 4 layers has no place: base has 2 of 6 here, the others 1 and 3."""


class Scores(NamedTuple):
    """Mean and spread of perplexity and BLEU, parameters."""

    perplexity: tuple[float, float]
    bleu: tuple[float, float]
    parameters: int


def main(argv: Sequence[str]) -> int:
    """The program; returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(
        prog="table3.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_options(parser)
    parser.add_argument("--steps", type=positive, default=500, metavar="N", help="training steps of each (default 500)")
    parser.add_argument("--seeds", type=positive, default=2, metavar="N", help="runs of each row (default 2)")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW", help="these rows alone")
    options = parser.parse_args(list(argv))
    import torch

    from benchmarks.small_runs import configure, one_process, prepare_quietly, train_seeds

    torch.set_num_threads(options.threads)
    steps, seeds = (4, 1) if options.quick else (options.steps, options.seeds)
    recorder, table = start_recording("table3.py", argv), {}
    with tempfile.TemporaryDirectory() as place, one_process() as topology:
        folder = Path(place)
        prepare_quietly(configure(folder, BASE, steps, 1, "base"))
        for name in options.only:
            say(f"{name}: {steps} steps, {seeds} seeds")
            keys = {**BASE, **ROWS[name].keys}
            outcomes = train_seeds(folder, name, keys, steps, range(1, seeds + 1), topology)
            table[name] = summary(name, [(o.nll, o.bleu) for o in outcomes], outcomes[0].parameters)
            record(recorder, name, table[name])
            if options.json is not None:
                write_rows(options.json, recorder.rows)  # an hour's rows outlive a run that is ended early
    print(beside_the_paper(table))
    return finish(recorder, options.json)


def summary(name: str, runs: Sequence[tuple[float | None, float | None]], parameters: int) -> Scores:
    """Of (nll, BLEU) of each seed. Raises RunError for a row that diverged."""
    from benchmarks.small_runs import mean_and_spread

    whole = [(nll, bleu) for nll, bleu in runs if nll is not None and bleu is not None]
    if len(whole) < len(runs):
        raise RunError(f"{name}: {len(runs) - len(whole)} of {len(runs)} runs diverged: no table can be made of them")
    perplexities, bleus = [math.exp(nll) for nll, _ in whole], [bleu for _, bleu in whole]
    return Scores(mean_and_spread(perplexities), mean_and_spread(bleus), parameters)


def record(recorder: Recorder, name: str, scores: Scores) -> None:
    """The rows of one row."""
    recorder.add(f"ppl-{name}", scores.perplexity[0], "per piece")
    recorder.add(f"ppl-spread-{name}", scores.perplexity[1], "per piece")
    recorder.add(f"bleu-{name}", scores.bleu[0], "BLEU")
    recorder.add(f"bleu-spread-{name}", scores.bleu[1], "BLEU")
    recorder.add(f"parameters-{name}", scores.parameters, "parameters")


def beside_the_paper(table: Mapping[str, Scores]) -> str:
    """The table as the paper prints it, with spreads and its own columns."""
    lines = ["| row | PPL | BLEU | parameters | paper: PPL | BLEU |", "|---|---:|---:|---:|---:|---:|"]
    for name, (perplexity, bleu, parameters) in table.items():
        theirs = ROWS[name]
        lines.append(
            f"| {name} | {perplexity[0]:.2f} ± {perplexity[1]:.2f} | {bleu[0]:.1f} ± {bleu[1]:.1f} | {parameters:,} | "
            f"{theirs.perplexity:.2f} | {theirs.bleu:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
