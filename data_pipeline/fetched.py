"""A streamed corpus as it was fetched: compressed text in .work, from which every later pass and every task reads.

A file holds a million pairs, source and target on alternate lines. What an interruption leaves is kept: the stream goes
on behind the last whole file. fetched.json, written last, holds the number of pairs.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from data_pipeline.errors import InputError
from data_pipeline.files import read_regular, write_atomically, write_json_atomically
from data_pipeline.progress import Log
from data_pipeline.sources import read_lines

PAIRS_PER_FILE = 1_000_000
_LINES_AT_ONCE = 10_000
_DONE = "fetched.json"

Pairs = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class _Content:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    pairs: int
    files: int


@dataclass(frozen=True)
class Fetched:
    """A corpus that was fetched whole into `folder`."""

    folder: Path
    lines: int
    files: int

    def pairs(self) -> Pairs:
        """(source, target) of every pair, in order. Raises InputError."""
        for number in range(self.files):
            lines = read_lines(_file(self.folder, number))
            yield from zip(lines, lines, strict=True)


def open_fetched(folder: Path) -> Fetched | None:
    """What was fetched into `folder`; None if that has not ended. Raises InputError."""
    path = folder / _DONE
    try:
        content = TypeAdapter(_Content).validate_json(read_regular(path))
    except FileNotFoundError:
        return None
    except ValidationError as fault:
        raise InputError(f"{path} is damaged ({fault.errors()[0]['msg']}): delete it, run prepare again") from None
    return Fetched(folder, content.pairs, content.files)


def fetch(read: Callable[[int], Pairs], folder: Path, log: Log) -> Fetched:
    """Fetches a corpus into `folder`, or what is missing of it; read(n) streams it from pair n.

    Raises InputError (also when there is nothing to fetch), OSError.
    """
    if (fetched := open_fetched(folder)) is not None:
        return fetched
    number = 0
    while _file(folder, number).is_file():
        number += 1
    total = number * PAIRS_PER_FILE
    log(f"fetching the training corpus, from pair {total:,}" if total else "fetching the training corpus")
    pairs = read(total)
    while first := next(pairs, None):
        counted = _Counted(itertools.chain((first,), itertools.islice(pairs, PAIRS_PER_FILE - 1)))
        write_atomically(_file(folder, number), counted.write)
        number, total = number + 1, total + counted.pairs
        log(f"fetched {total:,} pairs")
    if total == 0:
        raise InputError("the training corpus is empty: expected pairs to train on")
    write_json_atomically(folder / _DONE, asdict(_Content(total, number)))
    return Fetched(folder, total, number)


class _Counted:
    """Pairs on their way into a file."""

    def __init__(self, source: Pairs) -> None:
        self._source = source
        self.pairs = 0

    def write(self, file: BinaryIO) -> None:
        """Writes the pairs, compressed."""
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as compressed:
            while some := list(itertools.islice(self._source, _LINES_AT_ONCE)):
                self.pairs += len(some)
                compressed.write("".join(f"{source}\n{target}\n" for source, target in some).encode())


def _file(folder: Path, number: int) -> Path:
    return folder / f"fetched-{number:06d}.zst"
