"""Shards behind a URL, as a folder on this machine: the small files are copied there, blocks are read by ranges.

The copy's name is a checksum of URL and indexes, so that it never changes once it is there: other shards at the same
URL have another one. All that an index names is checked against its checksum before it is put in place, by one process
of the machine while the others wait.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.block_cache import BlockCache, held
from data_pipeline.errors import InputError, describe_os_error
from data_pipeline.files import sha256_of, write_bytes_atomically
from data_pipeline.index import INDEX_FILE, Index, ShardEntry, read_index
from data_pipeline.remote import Check, Remote, Stop

_AT_ONCE = 8 << 20


class RemoteSegments:
    """The blocks of one split: a `Segments` of `ShardReader` that reads ranges, through the cache."""

    def __init__(self, remote: Remote, split: str, cache: BlockCache) -> None:
        self._remote, self._split, self._cache = remote, split, cache
        self.mend = f"copy the shards to {remote.url} again"

    def name(self, shard: ShardEntry) -> str:
        """The URL of a shard."""
        return self._remote.name(f"{self._split}/{shard.file}")

    def check(self, shard: ShardEntry) -> None:
        """Nothing: to ask for the size of thousands of shards takes minutes, and blocks are checked when read."""

    def read(self, shard: ShardEntry, inside: int, stop: Stop = lambda: False) -> bytes:
        """The bytes of a block, whole and with the checksum of the index. Raises InputError, RunError."""
        place, checksum = shard.blocks[inside], shard.block_checksums[inside]

        def differs(data: bytes) -> str | None:
            if zlib.crc32(data) == checksum:
                return None
            return f"gave a damaged block at byte {place.offset} (its checksum differs from the index)"

        def fetch() -> bytes:
            return self._remote.fetch(f"{self._split}/{shard.file}", differs, place.offset, place.bytes, stop)

        return self._cache.get(shard.checksum, inside, checksum, fetch)

    def checksum(self, shard: ShardEntry) -> str:
        """sha256 of the whole file, as it is there now. Raises InputError, RunError."""
        digest = hashlib.sha256()
        for start in range(0, shard.bytes, _AT_ONCE):
            size = min(_AT_ONCE, shard.bytes - start)
            digest.update(self._remote.fetch(f"{self._split}/{shard.file}", start=start, size=size))
        return digest.hexdigest()


def copy_small_files(remote: Remote, folder: Path, splits: Sequence[str], tokenizer_file: str) -> Path:
    """Copies indexes, tokenizer, lengths and held-out text of the shards into a folder below `folder`, whose path it
    returns. Raises InputError, RunError."""
    contents = {split: remote.fetch(f"{split}/{INDEX_FILE}", _not_json) for split in splits}
    name = hashlib.sha256(b"\0".join((remote.url.encode(), *contents.values()))).hexdigest()[:32]
    copy = folder / "shards" / name
    try:
        copy.mkdir(parents=True, exist_ok=True)
        with held(copy / "lock"):
            indexes: dict[str, Index] = {}
            for split, content in contents.items():
                (copy / split).mkdir(exist_ok=True)
                write_bytes_atomically(copy / split / INDEX_FILE, content)
                indexes[split] = _read_index(remote, copy / split)
            wanted = {tokenizer_file: indexes[splits[0]].tokenizer_checksum}
            for split, index in indexes.items():
                wanted |= {f"{split}/{shard.lengths_file}": shard.lengths_checksum for shard in index.shards}
                wanted |= {f"{split}/{file}": checksum for file, checksum in index.texts.items()}
            for file, checksum in wanted.items():
                path = copy / file
                if not path.is_file() or sha256_of(path) != checksum:
                    write_bytes_atomically(path, remote.fetch(file, _differs_from(checksum)))
    except OSError as fault:
        raise describe_os_error(fault, f"copying {remote.url} to {copy} (data.cache names another folder)") from fault
    return copy


def _not_json(data: bytes) -> str | None:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return "is no index (JSON), or part of one"
    return None


def _differs_from(checksum: str) -> Check:
    def differs(data: bytes) -> str | None:
        return None if hashlib.sha256(data).hexdigest() == checksum else "has another checksum than the index says"

    return differs


def _read_index(remote: Remote, folder: Path) -> Index:
    try:
        return read_index(folder)
    except InputError as fault:
        raise InputError(f"{remote.name(folder.name)}: as it was fetched, {fault}") from None
