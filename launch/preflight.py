"""Is everything ready for a run? Answered before the first expensive second, on the processes that will train.

Rank 0 looks at configuration, shards, tokenizer, run directory and disk; all ranks compare versions and what they see
of the file system, then measure arithmetic, links and an all-reduce. All that is wrong is said at once.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: Python put this folder, not the repository, on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence

from data_pipeline.command_line import parse_command_line
from data_pipeline.settings import run_main
from dist_tfm.config.layout import check_world
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config
from dist_tfm.errors import ConfigError, DistTfmError, InputError
from dist_tfm.model.counting import parameter_counts
from dist_tfm.parallel.attempt import note_stopped, recorded
from dist_tfm.parallel.environment import read_ranks, speaks_for_all
from dist_tfm.training.signals import StopRequest
from launch.findings import Findings, nearest_existing

DESCRIPTION = """Checks that a run can start: configuration, shards, tokenizer, run directory, room for checkpoints,
versions and files on all nodes, arithmetic and links of each node, an all-reduce over all ranks. Started like train.py
(srun, accelerate, torchrun or alone) with the same arguments. Nothing is left behind.
Exit codes: 0 ready, 1 the processes cannot talk to each other, 2 something is missing or does not match."""

LEAST_TOKENS = 2000
"""Tokens a side and rank below which a step is mostly communication."""

MASTERS_AND_MOMENTS = 12
"""Bytes a parameter in a checkpoint: fp32 weights and Adam's two moments."""

WEIGHTS = 4
"""Bytes a parameter in a snapshot, and in a checkpoint for its moving average."""

GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    ranks = read_ranks(os.environ)
    stop = StopRequest(speaks=ranks.rank == 0).install(ranks.launcher)
    findings = Findings(speaks=ranks.rank == 0)
    config, for_ranks = Config(), ranks.world_size
    try:
        sections, options = parse_command_line(
            "preflight",
            DESCRIPTION,
            SECTIONS,
            "configs/tiny.yaml",
            argv,
            add_options=_add_options,
            check=check_sections,
        )
        config, for_ranks = make_config(sections), options.ranks or ranks.world_size
        check_world(config, for_ranks, for_ranks if options.ranks else ranks.local_world_size)
        findings.good(f"configuration {options.config}, for {for_ranks} rank(s)")
    except ConfigError as fault:
        if ranks.world_size == 1:
            raise
        findings.fault(str(fault))  # heard by all ranks once they have met, so that none waits for another
    if ranks.rank == 0 and not findings.faults:
        check_batches(config, for_ranks // (config.parallel.tp * config.parallel.pp), findings)
        check_files(config, findings)

    from launch.preflight_nodes import check_nodes  # seconds of imports (torch)

    check_nodes(config, ranks, findings)
    if findings.faults:
        count = "1 fault" if len(findings.faults) == 1 else f"{len(findings.faults)} faults"
        error = InputError(f"this run cannot start, preflight found {count}:\n  " + "\n  ".join(findings.faults))
        error.shared = True
        raise error
    if stop and ranks.rank == 0:
        note_stopped()
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=_positive, metavar="N", help="judge batch and layout for N ranks (default: as many as run)"
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks from 1, found {text!r}")
    return int(text)


def check_batches(config: Config, ranks: int, findings: Findings) -> None:
    """Whether a step's batch keeps `ranks` data-parallel ranks busy."""
    data = config.data
    rounds = -(-data.micro_batches // ranks)
    idle = 1 - data.micro_batches / (rounds * ranks)
    share = data.batch_tokens // ranks
    said = (
        f"data.batch_tokens={data.batch_tokens:,} a side on {ranks} rank(s): {share:,} tokens a rank and step, "
        f"in {rounds} micro-batch(es)"
    )
    if ranks > 1 and share < LEAST_TOKENS:
        findings.warn(
            f"{said}; below {LEAST_TOKENS:,} most of a step is communication: raise data.batch_tokens "
            "(configs/big_enfr_32gpu.yaml shows how) or use fewer GPUs"
        )
    else:
        findings.good(said)
    if idle:
        findings.warn(
            f"data.micro_batches={data.micro_batches} is no multiple of {ranks} ranks: {idle:.0%} of their time is "
            "spent on empty micro-batches"
        )


def check_files(config: Config, findings: Findings) -> None:
    """Shards, tokenizer, run directory and disk, as rank 0 sees them."""
    vocab_size = config.tokenizer.vocab_size
    try:
        vocab_size = check_shards(config, findings)
    except DistTfmError as fault:
        findings.fault(str(fault))
    findings.check(lambda: check_run_directory(config))
    findings.check(lambda: check_room(config, vocab_size))


def check_shards(config: Config, findings: Findings) -> int:
    """The vocabulary's size. Missing shards are a warning if the corpus is there, since training prepares them."""
    from data_pipeline.prepare import check_prepared
    from data_pipeline.prepared import is_complete, open_prepared
    from data_pipeline.sources import resolve

    folder, data = Path(config.data.shards), config.data
    if is_complete(folder):
        check_prepared(data, config.tokenizer)
        prepared = open_prepared(folder)
        pairs, shards = prepared.train.index.pairs, len(prepared.train.index.shards)
        findings.good(
            f"shards in {folder}: {pairs:,} pairs in {shards} shard(s), {prepared.valid.index.pairs:,} held out; "
            f"tokenizer of {prepared.tokenizer.vocab_size:,} ids matches (sha256 {prepared.tokenizer.checksum[:12]})"
        )
        return prepared.tokenizer.vocab_size
    texts = (data.train_source, data.train_target, data.valid_source, data.valid_target)
    missing = [text for text in texts if not resolve(text).is_file()]
    if missing:
        raise InputError(
            f"data.shards={folder} holds no complete shards, and the corpus to make them from is not there "
            f"({', '.join(missing)}): prepare the shards (data_pipeline/prepare.py) or name the ones that you have"
        )
    findings.warn(
        f"data.shards={folder} holds no complete shards: rank 0 will prepare them while all others wait; "
        "data_pipeline/prepare.py does it without holding GPUs (docs/preparing_data.md)"
    )
    return config.tokenizer.vocab_size


def check_run_directory(config: Config) -> str:
    """That the run directory may be used for this configuration, and written. Leaves nothing there."""
    from dist_tfm.training.run_directory import RunDirectory

    path = Path(config.train.run_dir)
    RunDirectory(path).check(config)
    there = nearest_existing(path)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        raise InputError(
            f"train.run_dir={path} cannot be written ({there}: {fault.strerror}): choose another directory"
        ) from None
    return f"train.run_dir={path} can be written"


def check_room(config: Config, vocab_size: int) -> str:
    """That the disk of the run directory has room for all the checkpoints that the run will keep at once."""
    path = Path(config.train.run_dir)
    wanted = checkpoint_bytes(config, vocab_size)
    there = sum(file.stat().st_size for name in ("checkpoints", "snapshots") for file in _files(path / name))
    free = shutil.disk_usage(nearest_existing(path)).free
    missing = wanted - there
    if missing > free:
        raise InputError(
            f"train.run_dir={path} has {free / GIB:.1f} GiB free, its checkpoints need {missing / GIB:.1f} GiB: "
            "free some, choose another directory, or lower checkpoint.keep or checkpoint.keep_snapshots"
        )
    return (
        f"room for checkpoints: {wanted / GIB:.2f} GiB at most, {free / GIB:,.1f} GiB free (a quota, if there is one, "
        "is not seen)"
    )


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Bytes of the checkpoints that stand side by side at most: those kept, the best, one being written; snapshots."""
    parameters = sum(parameter_counts(config.model, vocab_size).values())
    each = MASTERS_AND_MOMENTS + (WEIGHTS if config.train.ema else 0)
    total = (config.checkpoint.keep + 2) * each
    if config.checkpoint.snapshot_every:
        total += (config.checkpoint.keep_snapshots + 1) * WEIGHTS
    return parameters * total


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


if __name__ == "__main__":
    run_main(recorded(lambda: main(sys.argv[1:])), speaks_for_all)
