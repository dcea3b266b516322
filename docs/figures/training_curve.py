"""Draws the curves of finished runs from their metrics: loss in training and validation, BLEU in validation.

    python docs/figures/training_curve.py runs/tiny runs/tiny_2 runs/tiny_3 --output docs/figures/tiny_training.svg

The same metrics give the same file, byte for byte.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.settings import run_main
from dist_tfm.errors import ConfigError, InputError, describe_os_error
from dist_tfm.metrics.reading import metric_values

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b07d2b")
WINDOW = 5
"""Logged steps that the drawn training loss is the mean of: single ones differ by their sentences."""

Curve = dict[int, float]


@dataclass(frozen=True)
class Run:
    """What is drawn of one run: step to value."""

    name: str
    training: Curve
    validation: Curve
    bleu: Curve


def read_run(folder: Path) -> Run:
    """The curves of a run directory. Raises InputError for one without training and validation lines."""
    from dist_tfm.config.loading import read_config

    curves = {key: metric_values(folder / METRICS, key) for key in ("loss", "valid_loss", "valid_bleu")}
    if empty := [key for key, curve in curves.items() if not curve]:
        raise InputError(f"{folder / METRICS} has no {' and no '.join(empty)}: expected a run that was validated")
    seed = read_config(folder / CONFIG).train.seed
    return Run(f"seed {seed}", smoothed(curves["loss"], WINDOW), curves["valid_loss"], curves["valid_bleu"])


def smoothed(curve: Curve, window: int) -> Curve:
    """The mean of each value and those before it, `window` in all."""
    values = list(curve.values())
    return {step: statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i, step in enumerate(curve)}


def draw(runs: Sequence[Run], output: Path) -> None:
    """Writes the picture. Raises ConfigError where matplotlib is missing, RunError where it cannot be written."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("expected matplotlib, which is not installed: pip install '.[dev]'") from None
    matplotlib.use("svg")
    # Text stays text, and names inside the file depend on nothing but this.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dist_tfm", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, (loss, bleu) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharex=True, layout="constrained")
    for run, colour in zip(runs, COLOURS, strict=False):
        plot(loss, run.training, colour=colour, style="-", label=f"training, {run.name}", width=1.0)
        plot(loss, run.validation, colour=colour, style="o--", label=f"validation, {run.name}", width=1.2)
        last = run.bleu[max(run.bleu)]
        plot(bleu, run.bleu, colour=colour, style="o-", label=f"{run.name}: {last:.1f} at the end", width=1.2)
    loss.set(xlabel="step", ylabel="nats a target token", title="Loss, label-smoothed")
    bleu.set(xlabel="step", ylabel="BLEU", title="BLEU of the validation sample, greedy", ylim=(0, None))
    for axes in (loss, bleu):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    try:
        figure.savefig(output, format="svg", metadata={"Date": None})
    except OSError as fault:
        raise describe_os_error(fault, f"writing {output}") from fault
    finally:
        pyplot.close(figure)


def plot(axes: Any, curve: Curve, colour: str, style: str, label: str, width: float) -> None:
    """One line of a panel."""
    steps = sorted(curve)
    axes.plot(
        steps, [curve[s] for s in steps], style, color=colour, label=label, linewidth=width, markersize=3.5, alpha=0.9
    )


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    parser = argparse.ArgumentParser(prog="training_curve.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"run directories, at most {len(COLOURS)}")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the picture, SVG")
    options = parser.parse_args(list(argv))
    if len(options.runs) > len(COLOURS):
        raise ConfigError(f"expected at most {len(COLOURS)} runs, found {len(options.runs)}: there are no more colours")
    draw([read_run(folder) for folder in options.runs], options.output)
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
