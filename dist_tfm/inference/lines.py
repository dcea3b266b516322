"""Where lines come from and where translations go: files, pipes and terminals.

A line ends with "\\n" and with nothing else; the last one may lack it. Lines are UTF-8.
"""

import os
import queue
import stat
import sys
import threading
from collections.abc import Sequence
from itertools import islice
from typing import BinaryIO, Protocol, TextIO

from tqdm import tqdm

from dist_tfm.errors import InputError
from dist_tfm.inference.translator import Translation

PAUSE = 0.2
"""Seconds after which a silent pipe's lines are translated without waiting for more."""


class LineSource(Protocol):
    """The input, on the one rank that reads it."""

    def read(self, count: int) -> list[str]:
        """Up to `count` lines, at least one; none at the end. Raises InputError for what is not UTF-8, OSError."""
        ...


class FileLines:
    """Lines of a regular file: always as many as are asked for, so that the same file makes the same batches."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._read = file, 0

    def read(self, count: int) -> list[str]:
        lines = list(islice(self._file, count))
        self._read += len(lines)
        return decode_lines(lines, self._read - len(lines))


class PipeLines:
    """Lines of another program: as many as are asked for, or what there is when it pauses or ends.

    A background thread reads, no further than `ahead` lines. It reads the descriptor itself: a buffered file that a
    thread waits on cannot be closed when the interpreter ends.
    """

    def __init__(self, descriptor: int, ahead: int, pause: float = PAUSE) -> None:
        self._descriptor, self._pause, self._read = descriptor, pause, 0
        self._lines: queue.Queue[bytes | OSError] = queue.Queue(maxsize=ahead)
        self._ended = False
        threading.Thread(target=self._fill, name="standard-input", daemon=True).start()

    def read(self, count: int) -> list[str]:
        lines: list[bytes] = []
        while not self._ended and len(lines) < count:
            try:
                line = self._lines.get(timeout=self._pause if lines else None)
            except queue.Empty:
                break
            if isinstance(line, OSError):
                raise line
            if line:
                lines.append(line)
            else:
                self._ended = True
        self._read += len(lines)
        return decode_lines(lines, self._read - len(lines))

    def _fill(self) -> None:
        """Queues lines with their ends, then b"" (or the fault that ended them)."""
        start: list[bytes] = []  # of a line whose end is still to come
        try:
            while chunk := os.read(self._descriptor, 1 << 16):
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    self._lines.put(b"".join(start) + end + b"\n")
                    start = []
                start.append(rest)
            if any(start):
                self._lines.put(b"".join(start))
            self._lines.put(b"")
        except OSError as fault:
            self._lines.put(fault)


class TerminalLines:
    """A person's lines, asked for one at a time; Ctrl-D ends. greeting: said once, before the first is asked for."""

    def __init__(self, file: BinaryIO, prompt: TextIO, greeting: str) -> None:
        self._file, self._prompt, self._read = file, prompt, 0
        print(greeting, file=prompt, flush=True)

    def read(self, count: int) -> list[str]:
        print("> ", end="", file=self._prompt, flush=True)
        line = self._file.readline()
        if not line:
            print(file=self._prompt, flush=True)
            return []
        self._read += 1
        return decode_lines([line], self._read - 1)


def decode_lines(lines: Sequence[bytes], before: int) -> list[str]:
    """Text of lines, without their ends; `before`: how many lines came earlier. Raises InputError."""
    texts = []
    for number, line in enumerate(lines, before + 1):
        try:
            texts.append(line.removesuffix(b"\n").decode("utf-8"))
        except UnicodeDecodeError as fault:
            raise InputError(
                f"line {number} of the input: expected UTF-8, found byte 0x{line[fault.start]:02x} at byte "
                f"{fault.start + 1} of the line: convert the input with iconv"
            ) from None
    return texts


def open_source(file: BinaryIO, window: int, greeting: str) -> LineSource:
    """The source that suits the kind of `file`. greeting: for a person at a terminal."""
    if file.isatty():
        return TerminalLines(file, sys.stderr, greeting)
    return FileLines(file) if is_regular(file) else PipeLines(file.fileno(), ahead=2 * window)


def is_regular(file: BinaryIO) -> bool:
    """Whether `file` is one on a disk, whose lines are all there."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:
        return False


def count_lines(file: BinaryIO) -> int:
    """Lines of a regular file from its present position, which stays where it is."""
    descriptor, position = file.fileno(), file.tell()
    count, last = 0, b"\n"
    while chunk := os.pread(descriptor, 1 << 20, position):
        count += chunk.count(b"\n")
        position += len(chunk)
        last = chunk[-1:]
    return count + (last != b"\n")


class TranslationWriter:
    """Writes each line's best translation, or all of them as `number ||| text ||| score` (numbers from 0).

    Everything is flushed as it is written. `broken`: the reader has gone; nothing more is written.
    """

    def __init__(self, file: BinaryIO, n_best: bool) -> None:
        self._file, self._n_best = file, n_best
        self._written = 0
        self.broken: BrokenPipeError | None = None

    def write(self, translations: Sequence[Sequence[Translation]]) -> None:
        """The translations of the next lines. Raises OSError, but not for a broken pipe."""
        lines: list[str] = []
        for number, found in enumerate(translations, self._written):
            if self._n_best:
                lines += [f"{number} ||| {t.text} ||| {t.score:.4f}\n" for t in found]
            else:
                lines.append(found[0].text + "\n")
        self._written += len(translations)
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
        except BrokenPipeError as fault:
            self.broken = fault


class LineProgress:
    """A bar on standard error if that is a terminal, of `total` lines if that is known."""

    def __init__(self, total: int | None, enabled: bool) -> None:
        self._bar = tqdm(total=total, unit="line", dynamic_ncols=True, disable=not enabled)

    def advance(self, lines: int) -> None:
        """This rank has translated `lines` more."""
        self._bar.update(lines)

    def settle(self, lines: int) -> None:
        """All ranks together have translated `lines` so far."""
        self._bar.update(lines - self._bar.n)

    def say(self, sentence: str) -> None:
        """A warning on standard error, above the bar."""
        tqdm.write(f"warning: {sentence}", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        self._bar.close()
