"""Corpus to tokenizer to shards: `python data_pipeline/prepare.py --config configs/X.yaml`.

Idempotent and resumable: every file is complete or absent, the indexes come last, and the same command finishes what an
interrupted one began, with the same bytes, whatever the number of processes. A folder that holds something else, or was
prepared from something else, is never touched.

    data.shards/DATA.json          what the shards are made from (record.py)
    data.shards/tokenizer.model    the shared SentencePiece BPE
    data.shards/report.json        pairs read, kept, rejected by reason; held-out pairs that are very long
    data.shards/{train,valid}/     shards, lengths, index.json; valid/ also source.txt and target.txt
"""

if __name__ == "__main__" and __package__ in (None, ""):
    # Run as a script: this folder is first on sys.path, where its modules would pass for top-level ones.
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.assemble import HeldOutSplit, Layout, LongPairs, make_index, write_train_shards, write_valid_shards
from data_pipeline.clean import REASONS, CleaningReport, normalise, rejection
from data_pipeline.encode import PAIRS_PER_PIECE, Encoder, Piece, Rules, encode_pieces, pieces_of
from data_pipeline.errors import InputError, describe_os_error
from data_pipeline.files import write_bytes_atomically, write_json_atomically
from data_pipeline.index import Index, write_index
from data_pipeline.parts import SAMPLE, Part, line_keys
from data_pipeline.prepared import TOKENIZER_FILE, TRAIN, VALID, is_complete, open_prepared
from data_pipeline.record import (
    LOCK_FILE,
    RECORD_FILE,
    Record,
    check_same,
    make_record,
    read_record,
    write_record,
)
from data_pipeline.sources import read_pairs, resolve
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

REPORT_FILE = "report.json"
WORK_FOLDER = ".work"
SMALL_CORPUS = 200_000
"""Up to so many pairs are encoded without other processes, unless data.prepare_workers asks for them."""

Log = Callable[[str], None]


def prepare(data: DataConfig, tokenizer: TokenizerConfig, log: Log) -> None:
    """Makes the shards of this configuration, or finishes them, or says that they are there.

    If the corpus is not there but shards are, they are checked against the configuration and against the checksums
    that were recorded of the corpus. Raises InputError (also when the folder was prepared from something else) and
    RunError (no space left, an encoding process died).
    """
    folder = Path(data.shards)
    try:
        known = read_record(folder)
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
        with _locked(folder, log):
            if not is_complete(folder):
                _finish(folder, data, tokenizer, asked, log)
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
    that they were encoded with and no file missing or cut short."""
    folder = Path(data.shards)
    known = read_record(folder)
    if known is None or not is_complete(folder):
        raise InputError(f"{folder} holds no complete shards: run prepare first")
    check_same(folder, known, make_record(data, tokenizer, known))
    prepared = open_prepared(folder)
    if prepared.fingerprint != known.fingerprint:
        raise InputError(f"the shards in {folder} are not those that its DATA.json describes: delete it, run prepare")


def _finish(folder: Path, data: DataConfig, tokenizer: TokenizerConfig, asked: Record, log: Log) -> None:
    # Once more, now that the lock is held: another process may have begun something else in the meantime.
    known = read_record(folder)
    if known is not None:
        check_same(folder, known, asked)
    try:
        _Preparation(folder, data, tokenizer, asked, log).run()
    except InputError:
        # What began here can never be finished: it must not stand in the way of the corrected command.
        if known is None:
            _discard(folder)
        raise


def _discard(folder: Path) -> None:
    """Removes what a preparation has begun, the record last."""
    for name in (WORK_FOLDER, TRAIN, VALID):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (TOKENIZER_FILE, REPORT_FILE, RECORD_FILE):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, log: Log) -> Iterator[None]:
    """Keeps a second preparation of the same folder waiting. The lock goes with its process, however that ends."""
    with open(folder / LOCK_FILE, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                log(f"{folder}: its file system has no locks, so make sure that nobody else prepares it now")
            else:
                log(f"another process is preparing {folder}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _summary(folder: Path) -> str:
    prepared = open_prepared(folder)
    train, valid = prepared.train.index, prepared.valid.index
    source_tokens, target_tokens = train.tokens
    return (
        f"{folder} holds {train.pairs:,} training pairs ({source_tokens:,} source, {target_tokens:,} target tokens; "
        f"shards: {len(train.shards)}), {valid.pairs:,} validation pairs, {train.vocab_size:,} ids"
    )


class _Preparation:
    """One run over a folder that is ours and locked. Each stage leaves whole files, and skips what is there."""

    def __init__(self, folder: Path, data: DataConfig, tokenizer: TokenizerConfig, record: Record, log: Log) -> None:
        self._folder = folder
        self._work = folder / WORK_FOLDER
        self._data = data
        self._tokenizer_config = tokenizer
        self._record = record
        self._log = log
        self._layout = Layout(data.pairs_per_block, data.pairs_per_shard)
        self._lines = record.corpus["train_source"].lines

    def run(self) -> None:
        """All stages. Raises InputError, RunError, OSError."""
        if read_record(self._folder) is None:
            write_record(self._folder, self._record)
        for folder in (self._work, self._folder / TRAIN, self._folder / VALID):
            folder.mkdir(exist_ok=True)
        tokenizer = self._tokenizer()
        held_out = write_valid_shards(
            self._pieces(VALID), Encoder(self._rules(None)), self._folder / VALID, self._layout
        )
        self._warn_of_long(held_out)
        parts = self._parts(tokenizer)
        train_report = CleaningReport()
        for part in parts:
            train_report.add(part.report)
        if not train_report.kept:
            raise InputError(f"no training pair is left after cleaning ({_reasons(train_report)})")
        with _Progress("writing shards", train_report.kept, self._log) as progress:
            shards = write_train_shards(parts, self._folder / TRAIN, self._work, self._layout, progress.add)
        train = make_index(TRAIN, self._record.fingerprint, tokenizer, shards, {})
        valid = make_index(VALID, self._record.fingerprint, tokenizer, held_out.shards, held_out.texts)
        self._report({TRAIN: (train_report, train), VALID: (held_out.report, valid)}, held_out.long)
        write_index(self._folder / VALID, valid)
        write_index(self._folder / TRAIN, train)
        shutil.rmtree(self._work, ignore_errors=True)

    def _pieces(self, split: str) -> Iterator[Piece]:
        names = (getattr(self._data, f"{split}_source"), getattr(self._data, f"{split}_target"))
        return pieces_of(read_pairs(resolve(names[0]), resolve(names[1])), PAIRS_PER_PIECE)

    def _tokenizer(self) -> Tokenizer:
        path = self._folder / TOKENIZER_FILE
        if not path.is_file():
            self._log(f"training the tokenizer ({self._tokenizer_config.vocab_size:,} ids)")
            sample = self._sample()
            first = next(sample, None)
            if first is None:
                raise InputError(
                    f"no pair of {self._data.train_source} and {self._data.train_target} is left to train a tokenizer "
                    "on: all are blank or rejected by data.max_ratio"
                )
            write_bytes_atomically(path, train_tokenizer(itertools.chain((first,), sample), self._tokenizer_config))
        return Tokenizer.load(path)

    def _sample(self) -> Iterator[str]:
        """Normalised lines of both sides, of a seeded sample of the pairs that cleaning keeps."""
        share = self._tokenizer_config.sample_lines / (2 * self._lines)
        # Keys are uniform over 64 bits, so those up to this one make the share.
        highest = (1 << 64) - 1 if share == 0 or share >= 1 else int(share * (1 << 64))
        for piece in self._pieces(TRAIN):
            keys = line_keys(self._data.shuffle_seed, SAMPLE, piece.first_line, len(piece.sources)).tolist()
            for key, raw_source, raw_target in zip(keys, piece.sources, piece.targets, strict=True):
                if key > highest:
                    continue
                source, target = normalise(raw_source), normalise(raw_target)
                if rejection(source, target, self._data.max_ratio) is None:
                    yield source
                    yield target

    def _rules(self, shuffle_seed: int | None) -> Rules:
        path = str((self._folder / TOKENIZER_FILE).resolve())
        return Rules(path, self._data.max_length, self._data.max_ratio, shuffle_seed)

    def _warn_of_long(self, held_out: HeldOutSplit) -> None:
        long = held_out.long
        if long.pairs:
            numbers = ", ".join(str(line) for line in long.lines)
            self._log(
                f"{long.pairs:,} of {held_out.report.kept:,} held-out pairs are longer than data.max_length = "
                f"{self._data.max_length} tokens (the longest has {long.longest:,}; lines {numbers}"
                f"{', ...' if long.pairs > len(long.lines) else ''} of {self._data.valid_source} and its other side): "
                "they stay, and slow every validation down"
            )

    def _parts(self, tokenizer: Tokenizer) -> list[Part]:
        """Every piece of the training text as a part, in order; parts of an earlier run are kept."""
        numbers: list[int] = []

        def path_of(number: int) -> Path:
            return (self._work / f"part-{number:06d}").resolve()

        def missing() -> Iterator[Piece]:
            for piece in self._pieces(TRAIN):
                numbers.append(piece.number)
                path = path_of(piece.number)
                if path.is_file() and Part(path).tokenizer_checksum == tokenizer.checksum:
                    progress.add(len(piece.sources))
                else:
                    yield piece

        with _Progress("encoding", self._lines, self._log) as progress:
            encode_pieces(missing(), self._rules(self._data.shuffle_seed), path_of, self._workers(), progress.add)
        return [Part(path_of(number)) for number in numbers]

    def _workers(self) -> int:
        asked = self._data.prepare_workers
        if asked == 0:
            asked = 1 if self._lines <= SMALL_CORPUS else len(os.sched_getaffinity(0))
        return asked if asked > 1 else 0

    def _report(self, splits: dict[str, tuple[CleaningReport, Index]], long: LongPairs) -> None:
        content: dict[str, dict[str, object]] = {}
        for split, (report, index) in splits.items():
            source_tokens, target_tokens = index.tokens
            content[split] = {**asdict(report), "source_tokens": source_tokens, "target_tokens": target_tokens}
        content[VALID]["longer_than_max_length"] = asdict(long)
        write_json_atomically(self._folder / REPORT_FILE, content)
        self._log(f"{'':6}{'read':>12}{'kept':>12}" + "".join(f"{reason:>12}" for reason in REASONS))
        for split, (report, _) in splits.items():
            counts = [report.read, report.kept, *(report.rejected.get(reason, 0) for reason in REASONS)]
            self._log(f"{split:6}" + "".join(f"{count:12,}" for count in counts))


def _reasons(report: CleaningReport) -> str:
    rejected = ", ".join(f"{pairs:,}: {REASONS[reason]}" for reason, pairs in report.rejected.items())
    return f"{report.read:,} read; {rejected}"


class _Progress:
    """A bar on a terminal; elsewhere a plain line now and then."""

    SECONDS = 10.0

    def __init__(self, title: str, total: int, log: Log) -> None:
        self._title, self._total, self._log = title, total, log
        self._bar = tqdm(total=total, desc=title, unit=" pairs", unit_scale=True) if sys.stderr.isatty() else None
        self._done = 0
        self._next = time.monotonic() + self.SECONDS

    def add(self, pairs: int) -> None:
        """Counts pairs as done."""
        self._done += pairs
        if self._bar is not None:
            self._bar.update(pairs)
        elif time.monotonic() >= self._next:
            self._log(f"{self._title}: {self._done:,} of {self._total:,} pairs")
            self._next = time.monotonic() + self.SECONDS

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def main(argv: Sequence[str]) -> int:
    """The program: prepares the shards of a configuration."""
    from data_pipeline.command_line import parse_command_line
    from data_pipeline.settings import foreign_to

    sections, _ = parse_command_line(
        program="prepare.py",
        description="Prepares a corpus: cleaning, tokenizer, shards. Run again to finish what was interrupted.",
        sections={"data": DataConfig, "tokenizer": TokenizerConfig},
        default_config="configs/tiny.yaml",
        argv=argv,
        foreign=foreign_to("data", "tokenizer"),
    )
    prepare(sections["data"], sections["tokenizer"], lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    from data_pipeline.settings import run_main

    run_main(lambda: main(sys.argv[1:]))
