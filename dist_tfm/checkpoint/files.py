"""Files that survive: written with their checksum, synced to the disk, and verified before they are believed."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dist_tfm.parallel.collectives import Json


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file: size in bytes and SHA-256."""

    size: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes a new file chunk by chunk and syncs it; nothing is kept in memory.

    Raises OSError (also if the file exists: nothing is ever overwritten).
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Makes new and renamed entries of a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_fault(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file: "missing", a size, a checksum; None if it is as recorded."""
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path.name}: expected {record.size} bytes, found {size}"
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as fault:
        return f"{path.name} cannot be read ({fault.strerror})"
    return None if digest == record.sha256 else f"{path.name}: its checksum differs"


def dump_json(value: Json) -> bytes:
    """Compact JSON with a newline; the same bytes for the same value."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def seal(record: dict[str, Json]) -> bytes:
    """JSON of `record` with a checksum of itself, so that an edited or damaged record is noticed."""
    return dump_json({**record, "sha256": hashlib.sha256(dump_json(record)).hexdigest()})


def unseal(data: bytes) -> dict[str, Json]:
    """The record that `seal` wrote. Raises ValueError if it is not whole and unchanged."""
    value = json.loads(data)  # a JSONDecodeError or UnicodeDecodeError is a ValueError
    if not isinstance(value, dict):
        raise ValueError("it is not a record")
    claimed = value.pop("sha256", None)
    if hashlib.sha256(dump_json(value)).hexdigest() != claimed:
        raise ValueError("its checksum differs")
    return value
