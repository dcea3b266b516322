"""Blocks of remote shards, kept on the local disk and shared by all processes of a machine.

A block is a file, written whole or not at all, named by its shard's checksum, and checked whenever it is read: what is
damaged in the cache is fetched again. Blocks that were not read for longest make room for new ones. The cache may be
deleted at any time.
"""

import contextlib
import fcntl
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.errors import RunError, describe_os_error, shorten
from data_pipeline.files import read_regular

GIGABYTE = 10**9
_LOCKS = 256
_KEPT = 0.9
"""Share of the bound that is left when room is made: making room looks at every file, so it is not done for each."""


def cache_folder(configured: str) -> Path:
    """data.cache, or the user's cache folder if that is empty."""
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dist_tfm"


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Holds a lock file against all threads and processes of this machine; waits for it. Raises OSError."""
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of it


class BlockCache:
    """At most so many bytes of blocks below a folder, whichever processes put them there."""

    def __init__(self, folder: Path, most_bytes: int = 0) -> None:
        """most_bytes: bound on all blocks in `folder`; 0: none. Raises RunError."""
        self._blocks, self._locks, self._most = folder / "blocks", folder / "locks", most_bytes
        self._total = folder / "total"
        with self._room():
            for part in (self._blocks, self._locks):
                part.mkdir(parents=True, exist_ok=True)

    def get(self, shard: str, number: int, checksum: int, fetch: Callable[[], bytes]) -> bytes:
        """Block `number` of the shard with this checksum: from the disk, else from `fetch`, by one process only.

        checksum: crc32, which `fetch` answers for. Raises what `fetch` raises, and RunError for a disk that is full.
        """
        path = self._blocks / shard / f"{number:06d}"
        with self._room():
            if (data := self._kept(path, checksum)) is not None:
                return data
        lock = self._locks / f"{zlib.crc32(f'{shard}/{number}'.encode()) % _LOCKS:03d}"
        with contextlib.ExitStack() as stack:
            with self._room():
                stack.enter_context(held(lock))
                if (data := self._kept(path, checksum)) is not None:
                    return data
            data = fetch()
            with self._room():
                self._keep(path, data)
        return data

    def _kept(self, path: Path, checksum: int) -> bytes | None:
        try:
            data = read_regular(path)
            if zlib.crc32(data) != checksum:
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not synced: what a power cut leaves of it has another checksum.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:  # Ctrl-C too: nobody else removes the half-written file
            Path(temporary).unlink(missing_ok=True)
            raise
        if self._most:
            self._count(len(data))

    def _count(self, size: int) -> None:
        """Adds to the bytes that are kept, and makes room if they are too many."""
        with held(self._locks / "total"):
            try:
                total = int(self._total.read_text()) + size
            except (FileNotFoundError, ValueError):
                total = self._most + 1  # not known: count them
            if total > self._most:
                total = self._make_room()
            self._total.write_text(str(total))

    def _make_room(self) -> int:
        """Removes the blocks that were not read for longest; the bytes that are left."""
        found: list[tuple[int, int, Path]] = []
        for path in self._blocks.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self._most:
            return total
        for _, size, path in sorted(found):
            if total <= self._most * _KEPT:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            error = describe_os_error(fault, f"keeping blocks of remote shards in {shorten(str(self._blocks.parent))}")
            raise RunError(f"{error}; data.cache names another folder, data.cache_gigabytes bounds it") from fault
