"""Translates lines: `python dist_tfm/translate.py --checkpoint runs/tiny < in.txt > out.txt`.

The same program under torchrun and srun shares the lines among its processes; rank 0 prints all of them in order.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
from collections.abc import Sequence

from data_pipeline.settings import run_main
from dist_tfm.errors import DistTfmError
from dist_tfm.inference.command_line import DecodingSettings, parse_decoding
from dist_tfm.parallel.environment import cores_per_rank, read_ranks, speaks_for_all
from dist_tfm.parallel.memory import keep_freed_memory

DESCRIPTION = """Translates standard input to standard output: one line out for each line in, in order.
On a terminal it asks for lines and answers each at once (Ctrl-D ends). Several --checkpoint are an ensemble.
Exit codes: 0 done, 1 fault while running, 2 configuration or input."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--n-best",
        nargs="?",
        const="",
        metavar="N",
        help="print the N best of each line (default decode.n_best) as `line number from 0 ||| text ||| score`",
    )


def _n_best_key(options: argparse.Namespace) -> list[tuple[str, str]]:
    return [("decode.n_best", options.n_best)] if options.n_best else []


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    try:
        settings, options = parse_decoding("translate.py", DESCRIPTION, argv, _add_options, _n_best_key)
    except DistTfmError as error:
        error.shared = True  # every rank reads the same command line and the same checkpoint
        raise
    return _run(settings, options.n_best is not None)


def _run(settings: DecodingSettings, n_best: bool) -> int:
    ranks = read_ranks(os.environ)
    # Seconds of imports, which --help and a misspelt key do not wait for.
    import torch

    from dist_tfm.inference.session import translate_standard_input
    from dist_tfm.parallel.topology import describe_fault, shutdown, start

    keep_freed_memory()
    # Launchers export OMP_NUM_THREADS=1, whatever cores there are.
    torch.set_num_threads(settings.launch.threads or cores_per_rank(ranks, os.environ))
    topology = start(ranks, settings.launch, report=lambda _: None)
    try:
        translate_standard_input(settings, n_best, topology)
    except RuntimeError as error:
        known = describe_fault(error, ranks)
        if known is None:
            raise
        raise known from error
    finally:
        shutdown()
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]), speaks_for_all)
