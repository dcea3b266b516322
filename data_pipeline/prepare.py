"""Corpus to tokenizer to shards: `python data_pipeline/prepare.py --config configs/X.yaml`.

What is too large for one machine is prepared by an array of tasks: `--stage tokenizer`, then `--task i/n` for every i
from 0 to n - 1, side by side, then `--stage finish`. The shards are the same, byte for byte, whatever n.

Idempotent and resumable: every file is complete or absent, the indexes come last, and the same command finishes what an
interrupted one began, with the same bytes, whatever the number of processes. A folder that holds something else, or was
prepared from something else, is never touched.

    data.shards/DATA.json          what the shards are made from (record.py)
    data.shards/tokenizer.model    the tokenizer
    data.shards/report.json        pairs read, kept, changed and rejected by step; held-out pairs that are very long
    data.shards/{train,valid}/     shards, lengths, index.json; valid/ also source.txt and target.txt
"""

if __name__ == "__main__" and __package__ in (None, ""):
    # Run as a script: this folder is first on sys.path, where its modules would pass for top-level ones.
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import errno
import fcntl
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.errors import ConfigError, InputError, describe_os_error, shorten
from data_pipeline.preparation import WORK_FOLDER, Preparation, discard
from data_pipeline.prepared import TOKENIZER_FILE, is_complete, open_prepared
from data_pipeline.progress import Log
from data_pipeline.record import (
    LOCK_FILE,
    RECORD_FILE,
    Record,
    check_same,
    make_record,
    read_record,
)
from data_pipeline.remote import is_remote
from data_pipeline.report import REPORT_FILE
from data_pipeline.settings import faults_error
from data_pipeline.slices import Slice, complete_division, parse_slice
from data_pipeline.tokenizer_training import tokenizer_faults

WHOLE = Slice(0, 1)
Stage = Literal["all", "tokenizer", "finish"] | Slice
"""What to do of a preparation: all of it, or one of its stages; a Slice is one task of an array."""


def prepare(data: DataConfig, tokenizer: TokenizerConfig, log: Log, stage: Stage = "all") -> None:
    """Makes the shards of this configuration, or finishes them, or says that they are there; or runs one stage of it.

    If the corpus is not there but shards are, they are checked against the configuration and against the checksums
    that were recorded of the corpus. Raises InputError (also when the folder was prepared from something else, or a
    stage's predecessor has not ended), ConfigError and RunError (no space left, an encoding process died).
    """
    if data.corpora:
        raise ConfigError(
            "data.corpora names corpora that are prepared each by itself: run prepare for each, without data.corpora, "
            "with its own data.shards and one tokenizer for all"
        )
    if faults := tokenizer_faults(tokenizer):
        raise faults_error(faults)
    if is_remote(data.shards):
        raise ConfigError(
            f"data.shards is {shorten(data.shards)}: expected a folder to prepare in; copy it to that address once it "
            "is complete"
        )
    folder = Path(data.shards)
    try:
        known = read_record(folder)
        if known is None and stage not in ("all", "tokenizer"):
            raise _not_begun(folder)
        asked = make_record(data, tokenizer, known)
        if known is not None:
            check_same(folder, known, asked)
        if is_complete(folder):
            check_prepared(data, tokenizer)
            # There if the run that finished was ended before it could tidy up.
            shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
            log(f"already prepared: {_summary(folder)}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / LOCK_FILE, log, shared=isinstance(stage, Slice)):
            if not is_complete(folder):
                _run(folder, data, tokenizer, asked, log, stage)
        if is_complete(folder):
            log(f"prepared: {_summary(folder)}")
    except OSError as fault:
        raise describe_os_error(fault, f"preparing shards in {folder}") from fault


def is_prepared(data: DataConfig, tokenizer: TokenizerConfig) -> bool:
    """Whether complete shards of exactly this configuration stand in data.shards. Cheap: the corpus is read again only
    if a file's size or time has changed. False also for what `prepare` would refuse: it says why."""
    try:
        check_prepared(data, tokenizer)
    except InputError:
        return False
    return True


def check_prepared(data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raises InputError unless complete shards of exactly this configuration stand in data.shards, with the tokenizer
    that they were encoded with and no file missing or cut short (but training shards with data.on_error: skip)."""
    folder = Path(data.shards)
    known = read_record(folder)
    if known is None or not is_complete(folder):
        raise InputError(f"{folder} holds no complete shards: run prepare first")
    check_same(folder, known, make_record(data, tokenizer, known))
    prepared = open_prepared(folder, skip_damaged=data.on_error == "skip")
    if prepared.fingerprint != known.fingerprint:
        raise InputError(f"the shards in {folder} are not those that its DATA.json describes: delete it, run prepare")


def _not_begun(folder: Path) -> InputError:
    return InputError(f"{folder} holds no tokenizer yet: run prepare.py --stage tokenizer first")


def _run(folder: Path, data: DataConfig, tokenizer: TokenizerConfig, asked: Record, log: Log, stage: Stage) -> None:
    # Once more, now that the lock is held: another process may have begun something else in the meantime.
    known = read_record(folder)
    if known is not None:
        check_same(folder, known, asked)
    preparation = Preparation(folder, data, tokenizer, asked, log)
    if stage == "all" or stage == "tokenizer":
        try:
            preparation.begin()
            if stage == "tokenizer":
                log(f"{folder} holds the tokenizer: next, prepare.py --task i/n for every i from 0 to n - 1")
                return
            preparation.encode(WHOLE)
            preparation.finish([WHOLE])
        except InputError:
            # What began here can never be finished: it must not stand in the way of the corrected command.
            if known is None:
                discard(folder, (TOKENIZER_FILE, REPORT_FILE, RECORD_FILE))
            raise
        return
    if not preparation.has_begun():
        raise _not_begun(folder)
    if stage == "finish":
        preparation.finish(complete_division(folder / WORK_FOLDER))
        return
    own = stage.folder(folder / WORK_FOLDER)
    own.mkdir(exist_ok=True)
    with _locked(own / LOCK_FILE, log, shared=False):
        preparation.encode(stage)
    log(f"task {stage.number}/{stage.count} of {folder} has ended; after the last one: prepare.py --stage finish")


@contextlib.contextmanager
def _locked(path: Path, log: Log, shared: bool) -> Iterator[None]:
    """Keeps a second preparation of the same folder waiting; tasks share it. The lock goes with its process, however
    that ends."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                log(f"{path.parent}: its file system has no locks, so make sure that nobody else prepares it now")
            else:
                log(f"another process is preparing {path.parent}: waiting for it")
                fcntl.flock(file, kind)
        yield


def _summary(folder: Path) -> str:
    prepared = open_prepared(folder, skip_damaged=True)
    train, valid = prepared.train.index, prepared.valid.index
    source_tokens, target_tokens = train.tokens
    return (
        f"{folder} holds {train.pairs:,} training pairs ({source_tokens:,} source, {target_tokens:,} target tokens; "
        f"shards: {len(train.shards)}), {valid.pairs:,} validation pairs, {train.vocab_size:,} ids"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--stage",
        choices=("all", "tokenizer", "finish"),
        default="all",
        help="what to do: everything (default); the tokenizer, before an array of tasks; the shards, after it",
    )
    one.add_argument(
        "--task",
        type=_slice,
        metavar="I/N",
        help="be task I (from 0) of N: clean and encode one slice of the corpus; tasks run side by side, on any "
        "machines that share data.shards",
    )


def _slice(text: str) -> Slice:
    try:
        return parse_slice(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def main(argv: Sequence[str]) -> int:
    """The program: prepares the shards of a configuration."""
    from data_pipeline.command_line import parse_command_line
    from data_pipeline.settings import foreign_to

    sections, options = parse_command_line(
        program="prepare.py",
        description="Prepares a corpus: cleaning, tokenizer, shards. Run again to finish what was interrupted.",
        sections={"data": DataConfig, "tokenizer": TokenizerConfig},
        default_config="configs/tiny.yaml",
        argv=argv,
        foreign=foreign_to("data", "tokenizer"),
        add_options=_add_options,
    )
    stage: Stage = options.task or options.stage
    prepare(sections["data"], sections["tokenizer"], lambda line: print(line, flush=True), stage)
    return 0


if __name__ == "__main__":
    from data_pipeline.settings import run_main

    run_main(lambda: main(sys.argv[1:]))
