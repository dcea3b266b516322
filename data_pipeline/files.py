"""Files that are complete or absent: written under a temporary name, flushed to the disk, renamed."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import InputError

TEMPORARY = ".tmp"
READ_SIZE = 1 << 20


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls `write` with an open temporary file beside `path`, then renames it to `path`. Raises OSError."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """`path` holds `content`, or what it held before."""

    def write(file: BinaryIO) -> None:
        file.write(content)

    write_atomically(path, write)


def write_json_atomically(path: Path, value: object) -> None:
    """Writes `value` as JSON that people can read, the same bytes for the same value."""
    write_bytes_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, what: str) -> object:
    """The JSON in `path`; `what` completes "is not ..." in the error. Raises InputError, FileNotFoundError."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as fault:
        raise InputError(f"{path} is not {what}: {fault}") from None


def sync_directory(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
