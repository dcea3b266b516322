"""Cleaning and encoding of the corpus, in this process or in several.

A worker is a process of its own that runs `python -m data_pipeline.encode`, takes pieces of text on its standard input
and answers on its standard output: nothing is pickled, the caller's main module is not imported again, and when the
caller is killed the worker meets the end of its input and goes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from data_pipeline.clean import BLANK, TOO_LONG, CleaningReport, normalise, rejection
from data_pipeline.errors import DistTfmError, InputError, RunError, describe_os_error
from data_pipeline.parts import SHUFFLE, EncodedPairs, line_keys, write_part
from data_pipeline.ragged import Integers, smallest_unsigned
from data_pipeline.tokenizer import Tokenizer

PAIRS_PER_PIECE = 32_768
"""Size of the pieces that preparation is cut into: what one process encodes, and an interruption loses, at a time."""


@dataclass(frozen=True)
class Rules:
    """What encoding depends on besides the text. shuffle_seed None: a held-out split, of which only blank pairs go."""

    tokenizer: str
    max_length: int
    max_ratio: float
    shuffle_seed: int | None


@dataclass(frozen=True)
class Piece:
    """Consecutive pairs of raw text; first_line counts from 0."""

    number: int
    first_line: int
    sources: Sequence[str]
    targets: Sequence[str]


def pieces_of(pairs: Iterable[tuple[str, str]], size: int) -> Iterator[Piece]:
    """Cuts a stream of pairs into pieces of `size` (the last one smaller)."""
    sources: list[str] = []
    targets: list[str] = []
    number = 0
    for source, target in pairs:
        sources.append(source)
        targets.append(target)
        if len(sources) == size:
            yield Piece(number, number * size, sources, targets)
            sources, targets, number = [], [], number + 1
    if sources:
        yield Piece(number, number * size, sources, targets)


def flatten(ids: Sequence[Sequence[int]], dtype: np.dtype[np.unsignedinteger[Any]]) -> tuple[Integers, Integers]:
    """(flat ids, lengths) of ragged lists."""
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    flat: Integers = np.fromiter(chain.from_iterable(ids), dtype=dtype, count=int(lengths.sum()))
    return flat, lengths.astype(smallest_unsigned(int(lengths.max(initial=0))))


@dataclass(frozen=True)
class EncodedPiece:
    """What becomes of a piece: its kept pairs in the order of the text, with their normalised text and the numbers
    [pairs] of their lines in the corpus files, from 0; and what was rejected."""

    pairs: EncodedPairs
    texts: list[tuple[str, str]]
    lines: NDArray[np.int64]
    report: CleaningReport


class Encoder:
    """Cleans and encodes pieces by the same rules, wherever it runs."""

    def __init__(self, rules: Rules) -> None:
        """Raises InputError if the tokenizer cannot be loaded."""
        self.rules = rules
        self.tokenizer = Tokenizer.load(Path(rules.tokenizer))

    def encode(self, piece: Piece) -> EncodedPiece:
        """Cleans and encodes a piece."""
        held_out = self.rules.shuffle_seed is None
        report = CleaningReport(read=len(piece.sources))
        kept: list[int] = []
        texts: list[tuple[str, str]] = []
        for row, raw in enumerate(zip(piece.sources, piece.targets, strict=True)):
            pair = (normalise(raw[0]), normalise(raw[1]))
            reason = rejection(*pair, self.rules.max_ratio)
            if reason is None or (held_out and reason != BLANK):
                kept.append(row)
                texts.append(pair)
            else:
                report.reject(reason)
        ids = [self.tokenizer.encode_normalised([pair[side] for pair in texts]) for side in (0, 1)]
        if not held_out:
            fits = [max(len(s), len(t)) <= self.rules.max_length for s, t in zip(*ids, strict=True)]
            report.reject(TOO_LONG, fits.count(False))
            ids = [[row for row, fit in zip(side, fits, strict=True) if fit] for side in ids]
            kept = [row for row, fit in zip(kept, fits, strict=True) if fit]
            texts = [pair for pair, fit in zip(texts, fits, strict=True) if fit]
        report.kept = len(kept)
        keys = line_keys(self.rules.shuffle_seed or 0, SHUFFLE, piece.first_line, len(piece.sources))[kept]
        source, source_lengths = flatten(ids[0], self.tokenizer.id_dtype)
        target, target_lengths = flatten(ids[1], self.tokenizer.id_dtype)
        pairs = EncodedPairs(keys, source, source_lengths, target, target_lengths)
        return EncodedPiece(pairs, texts, piece.first_line + np.array(kept, dtype=np.int64), report)

    def write(self, piece: Piece, path: Path) -> CleaningReport:
        """Encodes a piece into a part. Raises OSError."""
        encoded = self.encode(piece)
        write_part(path, encoded.pairs, encoded.report, self.tokenizer.checksum)
        return encoded.report


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
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(workers, "encode") as pool:
        try:
            for future in as_completed([pool.submit(drive) for _ in range(workers)]):
                future.result()
        except BaseException:
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
        header = {
            "number": piece.number,
            "first_line": piece.first_line,
            "bytes": [len(text) for text in texts],
            "path": str(path),
        }
        try:
            stdin = cast(IO[bytes], self._process.stdin)
            stdin.write(json.dumps(header).encode() + b"\n" + b"".join(texts))
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
        sources, targets = (requests.read(size).decode().split("\n") for size in header["bytes"])
        piece = Piece(header["number"], header["first_line"], sources, targets)
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
