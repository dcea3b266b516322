"""How fast a configuration trains in one process, and what the engine costs over a bare PyTorch loop.

    python benchmarks/train_throughput.py                       configs/tiny.yaml, fp32 and bf16
    python benchmarks/train_throughput.py --parts engine        only the engine against the bare loop
    python benchmarks/train_throughput.py --config configs/base_ende.yaml --data.shards=shards/mine
    python benchmarks/train_throughput.py --setup               makes the peers' environments, in .venv-peers/
    python benchmarks/train_throughput.py --against torch,fairseq,eole
                                                                all that, and base dimensions beside these peers
    python benchmarks/train_throughput.py --train.kernels=native ...
                                                                ours with compiled kernels (dist_tfm-DTYPE-cpp)

Real tokens a second (source + target, pads not counted) of the real loader, model, loss and engine; each dtype in a
process of its own, so that its peak of memory is its own.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Sequence

from benchmarks.harness import Recorder, add_common_options, finish, positive, read_rows, say, start_recording
from benchmarks.peers import TRAINING_PACKAGES, set_up
from data_pipeline.command_line import parse_command_line
from data_pipeline.prepare import prepare
from data_pipeline.prepared import open_prepared
from data_pipeline.settings import run_main
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import ConfigError, RunError
from dist_tfm.parallel.environment import read_ranks
from dist_tfm.parallel.memory import keep_freed_memory

SCRIPT = Path(__file__).name
DESCRIPTION = "Measures training: tokens a second, share of the GEMM peak, padding, memory; and the engine's own cost."
DTYPES, PARTS = ("fp32", "bf16"), ("training", "engine", "against")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common_options(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="timed training steps (default 60)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="timed steps of the engine part (default 5)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="default: both")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: training, engine, and what --against asks")
    parser.add_argument("--setup", action="store_true", help="only make the peers' environments (takes the network)")
    parser.add_argument("--against", type=_peers, default=(), metavar="A,B", help=f"of {', '.join(TRAINING_PACKAGES)}")


def _peers(text: str) -> tuple[str, ...]:
    """Names of peers between commas, for argparse."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in TRAINING_PACKAGES]:
        raise argparse.ArgumentTypeError(f"expected names of {', '.join(TRAINING_PACKAGES)}, found {unknown[0]!r}")
    return names


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    keep_freed_memory()  # as train.py does
    sections, options = parse_command_line(
        SCRIPT, DESCRIPTION, SECTIONS, "configs/tiny.yaml", argv, add_options=_add_options, check=check_sections
    )
    if options.setup:
        for peer, packages in TRAINING_PACKAGES.items():
            set_up(peer, packages, ("--no-deps", "--no-build-isolation"))
        return 0
    if len(options.dtypes) == 1:
        config = make_config(sections)
        config = dataclasses.replace(
            config,
            precision=dataclasses.replace(config.precision, dtype=options.dtypes[0]),
            launch=dataclasses.replace(config.launch, threads=options.threads),
        )
        return finish(_measure(config, options, argv), options.json)
    recorder = start_recording(SCRIPT, argv)
    for dtype in options.dtypes:
        _measure_elsewhere(argv, dtype, recorder)
    return finish(recorder, options.json)


def _measure_elsewhere(argv: Sequence[str], dtype: str, recorder: Recorder) -> None:
    """Runs this program for one dtype in a process of its own and takes over its rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        arguments = [*argv, "--dtypes", dtype, "--json", str(rows)]
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.DEVNULL)
        if done.returncode:
            raise RunError(f"the process that measured {dtype} ended with exit code {done.returncode}: see above")
        recorder.rows += [dataclasses.replace(row, command=recorder.command) for row in read_rows(rows)]


def _measure(config: Config, options: argparse.Namespace, argv: Sequence[str]) -> Recorder:
    ranks = read_ranks(os.environ)
    if ranks.world_size != 1:
        raise ConfigError(f"expected one process, found {ranks.world_size} (by {ranks.launcher}): start it by python")
    # Seconds of imports, which --help does not wait for.
    import torch

    from benchmarks.engine_cost import PAPERLIKE, QUICK, measure_engine_cost
    from benchmarks.training_peers import BASE, measure_against
    from benchmarks.training_peers import QUICK as QUICK_COMPARISON
    from benchmarks.training_speed import measure_training
    from dist_tfm.parallel.topology import shutdown, start

    torch.set_num_threads(options.threads)
    topology = start(ranks, config.launch, report=say)
    gpu = torch.cuda.get_device_name(topology.device) if topology.device.type == "cuda" else None
    recorder = start_recording(SCRIPT, argv, gpu)
    effort = QUICK if options.quick else PAPERLIKE
    rounds = options.rounds or effort.rounds
    effort = dataclasses.replace(effort, rounds=rounds, profiled=min(rounds, effort.profiled))
    try:
        parts = options.parts or (PARTS if options.against else PARTS[:2])
        if options.against and "against" in parts:
            # First, since memory is looked at: its peak is that of all that was done before.
            comparison = QUICK_COMPARISON if options.quick else BASE
            comparison = dataclasses.replace(comparison, rounds=options.rounds or comparison.rounds)
            measure_against(config, options.against, comparison, topology, options.threads, recorder)
        if not {"training", "engine"} & set(parts):
            return recorder
        prepare(config.data, config.tokenizer, say)
        prepared = open_prepared(Path(config.data.shards))
        if "training" in parts:
            steps, chunk = options.steps or (2 if options.quick else 60), 1 if options.quick else 4
            measure_training(config, prepared, topology, steps, chunk, effort.gemm_seconds, recorder)
        if "engine" in parts:
            measure_engine_cost(config, prepared.train, topology, effort, recorder)
    finally:
        shutdown()
    return recorder


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
