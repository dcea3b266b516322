"""Averages the weights of a run: `python dist_tfm/average.py runs/base_ende --last 5`.

The result is a checkpoint with weights alone that translate, evaluate and train.init_from read like any other.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Sequence

from data_pipeline.settings import run_main
from dist_tfm.errors import describe_os_error

DESCRIPTION = """Averages the weights of a run (Vaswani et al. 2017, section 6.1: the last 5 of a base model, the last
20 of a big one, written every 10 minutes). Taken are the weights-only snapshots in RUN/snapshots
(checkpoint.snapshot_every); of a run that has none, its full checkpoints.

The result has the format of a checkpoint, with weights alone. Name it to use it, as in
`translate.py --checkpoint RUN/averaged`: RUN itself still means the newest checkpoint, and no run resumes from an
average. An earlier average in the same place is replaced."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="average.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--last",
        type=_positive,
        metavar="N",
        help="the last N (default: all snapshots there are, or the last checkpoint.keep checkpoints)",
    )
    which.add_argument(
        "--best",
        type=_positive,
        metavar="N",
        help="the N best by the run's checkpoint.best_metric, of those written at a validated step",
    )
    which.add_argument(
        "--ema", action="store_true", help="the moving average of a run with train.ema, from its newest checkpoint"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write it (default: RUN/averaged)")
    return parser


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    options = _parser().parse_args(argv)
    # A second of imports, which --help does not wait for.
    from dist_tfm.checkpoint.average import average_checkpoints
    from dist_tfm.checkpoint.layout import averaged_dir

    output = options.output or averaged_dir(options.run)
    members = _choose(options)
    kind = "ema" if options.ema else "fp32"
    try:
        average_checkpoints(members, output, kind)
    except OSError as fault:
        raise describe_os_error(fault, f"averaging into {output}") from fault
    what = "the moving average in" if options.ema else "the mean of"
    print(f"{output}: {what} {', '.join(f'{path.parent.name}/{path.name}' for path in members)}")
    return 0


def _choose(options: argparse.Namespace) -> list[Path]:
    from dist_tfm.checkpoint.average import choose_best, choose_last, find_members, newest_checkpoint
    from dist_tfm.checkpoint.layout import CONFIG
    from dist_tfm.config.loading import read_config
    from dist_tfm.metrics.reading import metric_values

    if options.ema:
        return [newest_checkpoint(options.run)]
    members = find_members(options.run)
    if options.best is None:
        return choose_last(members, options.last)
    metric = read_config(members[-1] / CONFIG).checkpoint.best_metric
    values = metric_values(options.run / "metrics.jsonl", metric)
    return choose_best(members, options.best, values, larger_is_better=metric == "valid_bleu")


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
