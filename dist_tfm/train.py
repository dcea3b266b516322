"""Trains an encoder-decoder Transformer: `python dist_tfm/train.py --config configs/tiny.yaml --train.steps=500`.

The same program under accelerate launch, torchrun, the deepspeed launcher and srun; the same command again resumes.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
from collections.abc import Sequence

from data_pipeline.command_line import parse_command_line
from data_pipeline.settings import run_main
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config
from dist_tfm.parallel.environment import cores_per_rank, read_ranks, speaks_for_all
from dist_tfm.training.signals import StopRequest

DESCRIPTION = """Trains an encoder-decoder Transformer: prepares missing shards, resumes from the newest checkpoint.
Exit codes: 0 done or stopped on request, 1 fault while running, 2 configuration or input, 3 training diverged."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, run the largest training and validation batch, report memory and speed, leave nothing",
    )
    # The deepspeed launcher adds it to the command line; the variable LOCAL_RANK, which it also sets, is what counts.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    stop = StopRequest().install()
    sections, options = parse_command_line(
        "train.py", DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    return _launch(make_config(sections), bool(options.dry_run), stop)


def _launch(config: Config, dry_run: bool, stop: StopRequest) -> int:
    ranks = read_ranks(os.environ)
    # Seconds of imports, which --help and a misspelt key do not wait for.
    import torch

    from dist_tfm.parallel.topology import describe_lost_process, shutdown, start
    from dist_tfm.training import dry_run as rehearsal
    from dist_tfm.training import session

    # Launchers export OMP_NUM_THREADS=1, whatever cores there are.
    torch.set_num_threads(config.launch.threads or cores_per_rank(ranks, os.environ))
    topology = start(ranks, config.launch)
    try:
        return rehearsal.rehearse(config, topology) if dry_run else session.run(config, topology, stop)
    except RuntimeError as fault:
        lost = describe_lost_process(fault, ranks)
        if lost is None:
            raise
        raise lost from fault
    finally:
        shutdown()


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]), speaks_for_all)
