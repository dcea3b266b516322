"""Trains a model, plainly or under accelerate, torchrun, deepspeed or srun; run again, it resumes."""

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
from dist_tfm.errors import ConfigError
from dist_tfm.parallel.attempt import recorded
from dist_tfm.parallel.environment import Ranks, cores_per_rank, read_ranks, speaks_for_all
from dist_tfm.parallel.memory import keep_freed_memory
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
    ranks = read_ranks(os.environ)
    config, dry_run = Config(), False
    fault: ConfigError | None = None
    try:
        sections, options = parse_command_line(
            "train.py", DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
        )
        config, dry_run = make_config(sections), bool(options.dry_run)
    except ConfigError as error:
        if ranks.world_size == 1:
            raise
        fault = error  # told to all ranks once they have met, so that one says it and none waits for another
    stop = StopRequest(speaks=ranks.rank == 0).install(ranks.launcher, rehearsal=dry_run)
    return _launch(config, ranks, dry_run, stop, fault)


def _launch(config: Config, ranks: Ranks, dry_run: bool, stop: StopRequest, fault: ConfigError | None) -> int:
    import torch  # seconds of imports, which --help and a misspelt key do not wait for

    from dist_tfm.parallel.topology import arrange, describe_fault, shutdown, start
    from dist_tfm.training import dry_run as rehearsal
    from dist_tfm.training import session

    keep_freed_memory()
    # Launchers export OMP_NUM_THREADS=1, whatever cores there are.
    torch.set_num_threads(config.launch.threads or cores_per_rank(ranks, os.environ))
    topology = start(ranks, config.launch)
    try:
        session.agree_on_configuration(config, topology, fault)
        topology = arrange(topology, config.parallel, config.launch)
        return rehearsal.rehearse(config, topology) if dry_run else session.run(config, topology, stop)
    except RuntimeError as error:
        if (known := describe_fault(error, ranks)) is None:
            raise
        raise known from error
    finally:
        stop.close()
        shutdown()


if __name__ == "__main__":
    run_main(recorded(lambda: main(sys.argv[1:])), speaks_for_all)
