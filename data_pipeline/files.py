"""Files: written so that they are complete or absent and survive a power cut; read only where they are regular ones.

Writing raises OSError; `errors.describe_os_error` turns it into a sentence.
"""

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import InputError

TEMPORARY = ".tmp"
"""Ending of a file that is not complete yet; what an interruption leaves behind bears it, and may be overwritten."""

READ_SIZE = 1 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls `write` with an open temporary file beside `path`, then renames it to `path`: nobody ever sees a part.

    What `write` raises goes through, and `path` stays as it was. Raises OSError.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        write(file)
        sync_file(file)
    rename_durably(temporary, path)


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """`path` holds `content`, or what it held before. Raises OSError."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    write_atomically(path, write)


def write_json_atomically(path: Path, value: object) -> None:
    """Writes `value` as JSON that people can read, the same bytes for the same value. Raises OSError."""
    write_bytes_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def sync_file(file: BinaryIO) -> None:
    """Makes what was written to an open file survive a power cut. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(folder: Path) -> None:
    """Makes names that were created, renamed or removed in `folder` survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Renames a synced file or folder within its folder, over a file called `target`, for good. Raises OSError."""
    os.replace(source, target)
    sync_directory(target.parent)


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading bytes. Never waits, as opening a pipe that nobody writes to does.

    Raises OSError, also for pipes, devices and sockets: its strerror says what was found and what was expected.
    """

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    # Handed to the caller, who closes it.
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise OSError(errno.EINVAL, f"expected a regular file, found {_KINDS.get(kind, 'something else')}", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError, also for pipes, devices and sockets."""
    with open_regular(path) as file:
        return file.read()


def read_json(path: Path, what: str) -> object:
    """The JSON in `path`; `what` completes "is not ..." in the error. Raises InputError, OSError."""
    try:
        return json.loads(read_regular(path))
    except (ValueError, RecursionError) as fault:
        raise InputError(f"{path} is not {what}: {fault}") from None


def sha256_of(path: Path) -> str:
    """Checksum of a regular file's content, in hexadecimal. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
