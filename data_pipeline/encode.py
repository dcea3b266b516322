"""Cleaning and encoding of the corpus, in this process or in several.

A worker is a process of its own that runs `python -m data_pipeline.encode`, takes pieces of text on its standard input
and answers on its standard output: nothing is pickled, the caller's main module is not imported again, and when the
caller is killed the worker meets the end of its input and goes.
"""

import contextlib
import json
import operator
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from data_pipeline.clean import BLANK, TOO_LONG, CleaningReport, changes_of, hash_of, hash_of_pair, normalise_all
from data_pipeline.errors import DistTfmError, InputError, RunError, describe_os_error
from data_pipeline.files import write_bytes_atomically
from data_pipeline.parts import SHUFFLE, EncodedPairs, Keys, line_keys, write_part
from data_pipeline.steps import Duplicates, Filter, HeldOut, Length, find, pair_filters, steps_from_json
from data_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rules:
    """What encoding depends on besides the text. shuffle_seed None: a held-out split, of which only blank pairs go.

    steps: data.clean as JSON. held_out: file of the hashes that its step held_out looks for; "" if it has none.
    """

    tokenizer: str
    steps: str
    max_length: int
    max_ratio: float
    shuffle_seed: int | None
    held_out: str = ""


def write_hashes(path: Path, hashes: Iterable[int]) -> None:
    """Writes what `Rules.held_out` names. Raises OSError."""
    write_bytes_atomically(path, np.array(sorted(set(hashes)), dtype="<u8").tobytes())


@dataclass(frozen=True)
class Piece:
    """Pairs of raw text with the numbers [pairs] of their lines in the corpus, from 0, in rising order."""

    number: int
    lines: NDArray[np.int64]
    sources: Sequence[str]
    targets: Sequence[str]


def pieces_of(
    pairs: Iterable[tuple[str, str]], size: int, chosen: Callable[[str], bool] | None = None
) -> Iterator[Piece]:
    """Cuts a stream of pairs into pieces of `size` (the last one smaller).

    chosen: of each source, whether its pair is wanted; None: all are.
    """
    numbered = enumerate(pairs)
    wanted = numbered if chosen is None else (entry for entry in numbered if chosen(entry[1][0]))
    number = 0
    while entries := list(islice(wanted, size)):
        lines, some = zip(*entries, strict=True)
        sources, targets = zip(*some, strict=True)
        yield Piece(number, np.array(lines, dtype=np.int64), sources, targets)
        number += 1


class Cleaner:
    """Normalises the pairs of a piece and asks the steps of `data.clean` that judge by text, in their order."""

    def __init__(self, filters: Mapping[str, Filter]) -> None:
        self._filters = list(filters.items())

    def clean(self, piece: Piece, report: CleaningReport) -> tuple[list[int], list[str], list[str]]:
        """(rows, sources, targets) of the pairs that stay; what goes and what was changed is counted in `report`."""
        sides = [normalise_all(piece.sources), normalise_all(piece.targets)]
        for pair in zip(piece.sources, piece.targets, *sides, strict=True):
            if pair[0] is not pair[2] or pair[1] is not pair[3]:
                for change in changes_of(pair[0]) | changes_of(pair[1]):
                    report.change(change)
        rows = list(range(len(piece.sources)))
        # Step by step, since a loop over pairs in Python costs more than most steps do.
        for reason, rejects in self._filters:
            rejected = list(map(rejects, *sides))
            if lost := sum(rejected):
                report.reject(reason, lost)
                stays = list(map(operator.not_, rejected))
                rows = list(compress(rows, stays))
                sides = [list(compress(side, stays)) for side in sides]
        return rows, sides[0], sides[1]


@dataclass(frozen=True)
class EncodedPiece:
    """What becomes of a piece: its kept pairs in the order of the text, with their normalised text, the numbers [pairs]
    of their lines in the corpus, from 0, and their hashes (if duplicates are looked for); and what was rejected."""

    pairs: EncodedPairs
    texts: list[tuple[str, str]]
    lines: NDArray[np.int64]
    hashes: Keys
    report: CleaningReport


class Encoder:
    """Cleans and encodes pieces by the same rules, wherever it runs."""

    def __init__(self, rules: Rules) -> None:
        """Raises InputError if the tokenizer cannot be loaded, OSError without the hashes that the rules name."""
        self.rules = rules
        self.tokenizer = Tokenizer.load(Path(rules.tokenizer))
        self._tokenizers = (self.tokenizer.source, self.tokenizer.target)
        steps = steps_from_json(rules.steps)
        held_out = rules.shuffle_seed is None
        if held_out:
            steps = tuple(step for step in steps if step.step == BLANK)
        filters = pair_filters(steps, rules.max_ratio, held_out_filter(find(steps, HeldOut), rules.held_out))
        self._cleaner = Cleaner(filters)
        self._longest = rules.max_length if find(steps, Length) is not None else None
        self._duplicates: Duplicates | None = find(steps, Duplicates)

    def encode(self, piece: Piece) -> EncodedPiece:
        """Cleans and encodes a piece."""
        report = CleaningReport(read=len(piece.sources))
        kept, *texts = self._cleaner.clean(piece, report)
        (source, source_lengths), (target, target_lengths) = (
            tokenizer.encode_flat(side) for tokenizer, side in zip(self._tokenizers, texts, strict=True)
        )
        lines = piece.lines[kept]
        keys = line_keys(self.rules.shuffle_seed or 0, SHUFFLE, lines)
        pairs = EncodedPairs(keys, source, source_lengths, target, target_lengths)
        if self._longest is not None:
            fits = np.maximum(source_lengths, target_lengths) <= self._longest
            if not fits.all():
                report.reject(TOO_LONG, len(fits) - int(fits.sum()))
                pairs, lines = pairs.take(np.flatnonzero(fits)), lines[fits]
                texts = [list(compress(side, fits)) for side in texts]
        report.kept = len(lines)
        return EncodedPiece(pairs, list(zip(*texts, strict=True)), lines, self._hashes(*texts), report)

    def _hashes(self, sources: Sequence[str], targets: Sequence[str]) -> Keys:
        if self._duplicates is None:
            return np.zeros(0, dtype=np.uint64)
        hashes = map(hash_of_pair, sources, targets) if self._duplicates.by == "pair" else map(hash_of, sources)
        return np.fromiter(hashes, dtype=np.uint64, count=len(sources))

    def write(self, piece: Piece, path: Path) -> CleaningReport:
        """Encodes a piece into a part. Raises OSError."""
        encoded = self.encode(piece)
        write_part(path, encoded.pairs, encoded.hashes, encoded.report, self.tokenizer.checksum)
        return encoded.report


def held_out_filter(step: HeldOut | None, hashes: str) -> Filter:
    """What step held_out does, given the file of its hashes. Raises OSError."""
    if step is None:
        return lambda source, target: False
    known = frozenset(np.fromfile(hashes, dtype="<u8").tolist())
    if step.by == "source":
        return lambda source, target: hash_of(source) in known
    return lambda source, target: hash_of_pair(source, target) in known


def encode_pieces(
    pieces: Iterator[Piece], rules: Rules, part_path: Callable[[int], Path], workers: int, done: Callable[[int], None]
) -> None:
    """Writes every piece as a part, in `workers` processes (0: in this one); done(pairs) is called after each.

    Raises what reading, encoding or writing raises, and RunError if a worker dies.
    """
    if workers == 0:
        encoder = Encoder(rules)
        for piece in pieces:
            encoder.write(piece, part_path(piece.number))
            done(len(piece.sources))
        return
    lock = threading.Lock()
    failed = threading.Event()

    def take() -> Piece | None:
        with lock:
            return None if failed.is_set() else next(pieces, None)

    def drive() -> None:
        try:
            with _Worker(rules) as worker:
                while (piece := take()) is not None:
                    worker.write(piece, part_path(piece.number))
                    with lock:
                        done(len(piece.sources))
        except BaseException:  # whatever it was, the other threads must take no more pieces
            failed.set()
            raise

    with ThreadPoolExecutor(workers, "encode") as pool:
        try:
            for future in as_completed([pool.submit(drive) for _ in range(workers)]):
                future.result()
        except BaseException:  # Ctrl-C too: leaving the pool waits for its threads, which must end first
            failed.set()
            raise


class _Worker:
    """An encoding process, seen from the caller."""

    def __init__(self, rules: Rules) -> None:
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "data_pipeline.encode", json.dumps(vars(rules))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def write(self, piece: Piece, path: Path) -> None:
        """`Encoder.write` over there. Raises the same errors."""
        texts = ["\n".join(side).encode() for side in (piece.sources, piece.targets)]
        numbers = piece.lines.astype("<i8").tobytes()
        header = {
            "number": piece.number,
            "bytes": [len(numbers), *(len(text) for text in texts)],
            "path": str(path),
        }
        try:
            stdin = cast(IO[bytes], self._process.stdin)
            stdin.write(json.dumps(header).encode() + b"\n" + numbers + b"".join(texts))
            stdin.flush()
            answer = cast(IO[bytes], self._process.stdout).readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise RunError(
                f"an encoding process ended unexpectedly (exit status {self._process.wait()}): run the same command "
                "again, it goes on where this one stopped; fewer data.prepare_workers need less memory"
            )
        reply = json.loads(answer)
        if "error" in reply:
            kind = InputError if reply["exit_code"] == InputError.exit_code else RunError
            raise kind(reply["error"])

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        # The end of its input ends the process; it is writing nothing by now.
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                cast(IO[bytes], pipe).close()
        self._process.wait()


def serve(rules: Rules, requests: BinaryIO, answers: BinaryIO) -> None:
    """What a worker does: answers every request with a line of JSON until its input ends."""
    encoder = Encoder(rules)
    while line := requests.readline():
        header = json.loads(line)
        numbers, *texts = (requests.read(size) for size in header["bytes"])
        sources, targets = (text.decode().split("\n") for text in texts)
        piece = Piece(header["number"], np.frombuffer(numbers, dtype="<i8"), sources, targets)
        reply: dict[str, object] = {"number": piece.number}
        try:
            encoder.write(piece, Path(header["path"]))
        except DistTfmError as fault:
            reply = {"error": str(fault), "exit_code": fault.exit_code}
        except OSError as fault:
            error = describe_os_error(fault, f"writing {header['path']}")
            reply = {"error": str(error), "exit_code": error.exit_code}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group, a Slurm job's signals all processes of a step; the caller decides what
    # happens, the end of the input tells us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    serve(Rules(**json.loads(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
