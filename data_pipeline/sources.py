"""Parallel text: one segment a line, two files of equally many lines, plain or compressed (.gz, .xz, .zst).

Lines end at \\n alone (text may hold U+2028 and its kin inside a segment); a \\r before it is dropped. The encoding is
strict UTF-8. Every fault names the file and, where there is one, the line.
"""

import codecs
import contextlib
import gzip
import hashlib
import itertools
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from data_pipeline.errors import InputError
from data_pipeline.files import READ_SIZE, open_regular

EMBEDDED = "embedded:"
CORPORA = Path(__file__).resolve().parent / "corpora"
"""Where the corpora that come with the package lie."""

_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


@dataclass(frozen=True)
class TextFacts:
    """What one pass over a text file tells. sha256 is of the text itself, so compressing it again changes nothing."""

    sha256: str
    lines: int


def resolve(name: str) -> Path:
    """The file that a configured name stands for; `embedded:` names lie in the package's corpora. Raises InputError."""
    if not name:
        raise InputError(
            "a corpus file has an empty name: set data.train_source, train_target, valid_source, valid_target"
        )
    if "\0" in name:
        raise InputError(f"a corpus file is called {name!r}: no file can have a NUL in its name")
    if not name.startswith(EMBEDDED):
        return Path(name)
    path = (CORPORA / name.removeprefix(EMBEDDED)).resolve()
    if not path.is_relative_to(CORPORA):
        raise InputError(f"{name} leaves the folder of embedded corpora: expected a path inside it")
    return path


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # The library's stream reader takes a truncated frame for the end of the file; the decompression object does not.
    with open_regular(path) as file:
        frame, started = zstandard.ZstdDecompressor().decompressobj(), False
        while data := file.read(READ_SIZE):
            while data:
                started = True
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame, started = zstandard.ZstdDecompressor().decompressobj(), False
        if started:
            raise EOFError("the last frame is not complete")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with open_regular(path) as file:
        if path.suffix == ".gz":
            with gzip.open(file, "rb") as unpacked:
                yield unpacked
        elif path.suffix == ".xz":
            with lzma.open(file, "rb") as unpacked:
                yield unpacked
        else:
            yield file


def _chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, a piece at a time. Raises InputError."""
    try:
        if path.suffix == ".zst":
            yield from _zstd_chunks(path)
            return
        with _open(path) as file:
            while data := file.read(READ_SIZE):
                yield data
    except FileNotFoundError:
        raise InputError(
            f"corpus file {path} not found: expected text, one segment a line, in {path.absolute().parent}"
        ) from None
    except IsADirectoryError:
        raise InputError(f"corpus file {path} is a folder: expected a text file, one segment a line") from None
    except _DAMAGED as fault:
        kind = path.suffix.removeprefix(".")
        raise InputError(f"corpus file {path} is damaged or no {kind} file ({fault}): restore it") from None
    except OSError as fault:
        # Also for what is no regular file: a corpus is read more than once, which pipes do not allow.
        raise InputError(f"corpus file {path} cannot be read: {fault.strerror or fault}") from None


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as fault:
        raise InputError(
            f"{path}, line {number}, byte {fault.start + 1} of the line: expected UTF-8, found "
            f"0x{line[fault.start]:02x}: convert the file to UTF-8"
        ) from None


def read_lines(path: Path) -> Iterator[str]:
    """The segments of a text file, without their line ends. Raises InputError."""
    rest, number = b"", 0
    for chunk in _chunks(path):
        whole, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            rest += chunk
            continue
        lines = _split(path, number, rest + whole)
        yield from lines
        rest, number = tail, number + len(lines)
    if rest:
        yield _decode(path, number + 1, rest)


def _split(path: Path, before: int, text: bytes) -> list[str]:
    """Decoded lines; `before` is the number of lines before them. One by one takes thrice as long."""
    try:
        lines = text.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        return [_decode(path, before + i, line) for i, line in enumerate(text.split(b"\n"), start=1)]
    return [line.removesuffix("\r") for line in lines] if b"\r" in text else lines


def read_pairs(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """(source, target) segments, lazily. Raises InputError, also when one side ends before the other."""
    return read_zipped((str(source), read_lines(source)), (str(target), read_lines(target)))


def read_zipped(source: tuple[str, Iterator[str]], target: tuple[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    """(source, target) segments of two sides, each with its name. Raises InputError when one ends before the other."""
    (source_name, left), (target_name, right) = source, target
    for count, (one, other) in enumerate(itertools.zip_longest(left, right)):
        if one is None:
            raise unequal_sides(source_name, count, target_name, count + 1 + sum(1 for _ in right))
        if other is None:
            raise unequal_sides(source_name, count + 1 + sum(1 for _ in left), target_name, count)
        yield one, other


def unequal_sides(source: str, source_lines: int, target: str, target_lines: int) -> InputError:
    """The error for two sides that cannot be each other's translation."""
    return InputError(
        f"{source} has {source_lines} lines but {target} has {target_lines}: line n of one must be the translation of "
        "line n of the other"
    )


def measure(path: Path) -> TextFacts:
    """Checksum and number of lines, having checked the encoding and that there is text at all. Raises InputError."""
    digest, lines, ended, nuls, size = hashlib.sha256(), 0, True, 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(path):
            digest.update(chunk)
            lines += chunk.count(b"\n")
            ended = chunk.endswith(b"\n")
            nuls += chunk.count(b"\0")
            size += len(chunk)
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as fault:
        # A second pass finds the line, which the first one has no time for.
        for _ in read_lines(path):
            pass
        raise InputError(f"{path}: expected UTF-8, found {fault.reason}: convert the file to UTF-8") from None
    if size == 0:
        raise InputError(f"corpus file {path} is empty: expected parallel text, one segment a line")
    if 4 * nuls > size:
        raise InputError(f"corpus file {path} seems to be UTF-16 ({nuls} NUL bytes): expected UTF-8, convert it")
    return TextFacts(digest.hexdigest(), lines + (not ended))
