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
from dist_tfm.config.layout import check_world, describe
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config, DataConfig
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
"""Tokens a side and rank below which a step is mostly communication (docs/slurm.md has the reckoning)."""

MASTERS_AND_MOMENTS = 12
"""Bytes a parameter in a checkpoint: fp32 weights and Adam's two moments."""

WEIGHTS = 4
"""Bytes a parameter in a snapshot, and in a checkpoint for its moving average."""

GIB = 1 << 30

OFFLINE = "HF_HUB_OFFLINE"
"""The variable by which the libraries of the hub are told to ask nobody; launch/slurm.sh sets it."""


def main(argv: Sequence[str]) -> int:
    """The program; argv without its name. Returns the exit code, raises DistTfmError."""
    ranks = read_ranks(os.environ)
    stop = StopRequest(speaks=ranks.rank == 0).install(ranks.launcher)
    findings = Findings(speaks=ranks.rank == 0)
    config, for_ranks, on_a_host = Config(), ranks.world_size, ranks.local_world_size
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
        config = make_config(sections)
        if options.ranks:
            for_ranks, on_a_host = options.ranks, options.ranks_per_node or min(options.ranks, 8)
        layout = check_layout(config, for_ranks, on_a_host)
        findings.good(f"configuration {options.config}, for {for_ranks} rank(s)")
        findings.good(layout)
    except ConfigError as fault:
        if ranks.world_size == 1:
            raise
        findings.fault(str(fault))  # heard by all ranks once they have met, so that none waits for another
    if ranks.rank == 0 and not findings.faults:
        check_batches(config, for_ranks, findings)
        check_files(config, findings)

    from launch.preflight_nodes import check_nodes  # seconds of imports (torch)

    check_nodes(config, ranks, findings)
    stop.close()
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
        "--ranks", type=_positive, metavar="N", help="judge layout and batch for N ranks (default: as many as run)"
    )
    parser.add_argument(
        "--ranks-per-node", type=_positive, metavar="N", help="of these on each host (default: 8, or all if fewer)"
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks from 1, found {text!r}")
    return int(text)


def check_layout(config: Config, ranks: int, on_a_host: int) -> str:
    """That `ranks` processes, `on_a_host` of them on each host, can be laid out as section `parallel` says."""
    check_world(config, ranks, on_a_host)
    parallel = config.parallel
    replicas = ranks // (parallel.tp * parallel.pp)
    return f"layout: {replicas} replica(s) of {describe(parallel)}"


def check_batches(config: Config, ranks: int, findings: Findings) -> None:
    """Whether a step's batch keeps `ranks` processes busy."""
    data = config.data
    replicas = max(1, ranks // (config.parallel.tp * config.parallel.pp))
    rounds = -(-data.micro_batches // replicas)
    idle = 1 - data.micro_batches / (rounds * replicas)
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
            f"data.micro_batches={data.micro_batches} is no multiple of {replicas} replicas: {idle:.0%} of their time "
            "is spent on empty micro-batches"
        )


def check_files(config: Config, findings: Findings) -> None:
    """Shards, tokenizer, run directory and disk, as rank 0 sees them."""
    sizes: tuple[int, int | None] = (config.tokenizer.vocab_size, None)
    try:
        sizes = check_shards(config, findings)
    except DistTfmError as fault:
        findings.fault(str(fault))
    findings.check(lambda: check_run_directory(config))
    findings.check(lambda: check_room(config, *sizes))


def check_shards(config: Config, findings: Findings) -> tuple[int, int | None]:
    """Sizes of the target's and the source's vocabulary. Missing shards are a warning if their corpus is there, since
    training prepares them."""
    from data_pipeline.prepare import check_prepared
    from data_pipeline.prepared import is_complete, open_corpora
    from data_pipeline.remote import is_remote

    data = config.data
    own = not data.corpora and not is_remote(data.shards)  # shards that prepare.py makes here
    if own and not is_complete(Path(data.shards)):
        check_corpus(data)
        findings.warn(
            f"data.shards={data.shards} holds no complete shards: rank 0 will prepare them while all others wait; "
            "slurm/prepare_data.sbatch does it without holding GPUs"
        )
        return config.tokenizer.vocab_size, None
    if own:
        check_prepared(data, config.tokenizer)
    opened = open_corpora(data)
    tokenizer = opened[0].tokenizer
    pairs = sum(prepared.train.index.pairs for prepared in opened)
    shards = sum(len(prepared.train.index.shards) for prepared in opened)
    places = [data.shards] if not data.corpora else [str(prepared.folder) for prepared in opened]
    findings.good(
        f"shards in {', '.join(places)}: {pairs:,} pairs in {shards} shard(s), "
        f"{sum(prepared.valid.index.pairs for prepared in opened):,} held out; tokenizer of "
        f"{tokenizer.vocab_size:,} ids matches (sha256 {tokenizer.checksum[:12]})"
    )
    return tokenizer.sizes


def check_corpus(data: DataConfig) -> None:
    """That the files to make shards from are there. Raises InputError.

    What comes over a network is not looked at, but the hub must not be needed where it may not be asked.
    """
    from data_pipeline.sources import resolve
    from data_pipeline.tables import parse_column

    offline = os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")
    missing = []
    for name in (data.train_source, data.train_target, data.valid_source, data.valid_target):
        column = parse_column(name)
        if column is not None and column.table.is_on_the_hub and offline:
            raise InputError(
                f"data.shards={data.shards} holds no complete shards, and their corpus would come from the hub "
                f"({column.table}), which {OFFLINE}=1 forbids: prepare the shards first (slurm/prepare_data.sbatch)"
            )
        files = [resolve(name)] if column is None else column.table.files
        missing += [str(file) for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"data.shards={data.shards} holds no complete shards, and the corpus to make them from is not there "
            f"({', '.join(dict.fromkeys(missing))}): prepare the shards (slurm/prepare_data.sbatch) or name the ones "
            "that you have"
        )


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


def check_room(config: Config, vocab_size: int, source_vocab_size: int | None = None) -> str:
    """That the disk of the run directory has room for all the checkpoints that the run will keep at once."""
    path = Path(config.train.run_dir)
    wanted = checkpoint_bytes(config, vocab_size, source_vocab_size)
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


def checkpoint_bytes(config: Config, vocab_size: int, source_vocab_size: int | None = None) -> int:
    """Bytes of the checkpoints that stand side by side at most: those kept, the best, one being written; snapshots."""
    parameters = sum(parameter_counts(config.model, vocab_size, source_vocab_size).values())
    each = MASTERS_AND_MOMENTS + (WEIGHTS if config.train.ema else 0)
    total = (config.checkpoint.keep + 2) * each
    if config.checkpoint.snapshot_every:
        total += (config.checkpoint.keep_snapshots + 1) * WEIGHTS
    return parameters * total


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


if __name__ == "__main__":
    run_main(recorded(lambda: main(sys.argv[1:])), speaks_for_all)
