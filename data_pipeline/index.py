"""index.json: what one split's shards hold, where each block lies, and the checksums of all of it.

    {format_version, tokenizer_checksum, vocab_size, special_ids, fingerprint, split, texts,
     shards: [{file, pairs, source_tokens, target_tokens, bytes, checksum, blocks: [[offset, bytes, pairs], ...],
               block_checksums, lengths_file, lengths_checksum}]}

Token counts count EOS. Checksums are sha256 in hexadecimal, those of blocks crc32. texts: sha256 of source.txt and
target.txt beside the shards (the held-out split has them; the training split's is empty).
"""

import dataclasses
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data_pipeline.api import SPECIAL_IDS, NotNegative, Positive
from data_pipeline.errors import InputError, shown
from data_pipeline.files import read_regular, write_json_atomically

FORMAT_VERSION = 1
INDEX_FILE = "index.json"

_STRICT = ConfigDict(extra="forbid", strict=True)
# A name, never a path: an index cannot point outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Crc32 = Annotated[int, Field(ge=0, lt=1 << 32)]


class BlockPlace(NamedTuple):
    """Where a block's tar segment lies in its shard (bytes), and how many pairs it holds."""

    offset: NotNegative
    bytes: Positive
    pairs: Positive


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """One shard: a tar file of blocks and the lengths sidecar beside it."""

    __pydantic_config__ = _STRICT

    file: FileName
    pairs: Positive
    source_tokens: Positive
    target_tokens: Positive
    bytes: Positive
    checksum: Sha256
    blocks: tuple[BlockPlace, ...]
    block_checksums: tuple[Crc32, ...]
    lengths_file: FileName
    lengths_checksum: Sha256


@dataclasses.dataclass(frozen=True)
class Index:
    """The content of an index.json."""

    __pydantic_config__ = _STRICT

    format_version: int
    tokenizer_checksum: Sha256
    vocab_size: Positive
    special_ids: dict[str, int]
    fingerprint: Sha256
    split: str
    shards: tuple[ShardEntry, ...]
    texts: dict[FileName, Sha256] = dataclasses.field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """Pairs in all shards."""
        return sum(shard.pairs for shard in self.shards)

    @property
    def tokens(self) -> tuple[int, int]:
        """(source, target) tokens in all shards, EOS included."""
        return sum(s.source_tokens for s in self.shards), sum(s.target_tokens for s in self.shards)


def mend(folder: Path) -> str:
    """How to mend anything that is wrong with the shards of `folder` (a split)."""
    return f"delete {folder.parent} and run prepare again"


def write_index(folder: Path, index: Index) -> None:
    """Writes `folder`/index.json: from then on the split counts as complete."""
    write_json_atomically(folder / INDEX_FILE, dataclasses.asdict(index))


def read_index(folder: Path) -> Index:
    """The index of one split's folder, checked in itself (shards are not opened). Raises InputError."""
    path = folder / INDEX_FILE
    try:
        content = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} not found: expected prepared shards, run prepare first") from None
    except OSError as fault:
        raise InputError(f"{path} cannot be read: {fault.strerror or fault}") from None
    try:
        version = TypeAdapter(dict[str, object]).validate_json(content).get("format_version")
        if version != FORMAT_VERSION:
            raise InputError(
                f"{path} has format version {shown(version)}, this program reads version {FORMAT_VERSION}: "
                f"{mend(folder)}"
            )
        index = TypeAdapter(Index).validate_json(content)
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{path} is damaged ({place}: {first['msg']}): {mend(folder)}") from None
    if index.special_ids != SPECIAL_IDS:
        raise InputError(f"{path} has special ids {shown(index.special_ids)}, expected {SPECIAL_IDS}: {mend(folder)}")
    for shard in index.shards:
        _check_blocks(path, shard)
    return index


def _check_blocks(path: Path, shard: ShardEntry) -> None:
    end = 0
    for block in shard.blocks:
        if block.offset != end:
            raise InputError(f"{path}: {shard.file} has no block at byte {end}: {mend(path.parent)}")
        if 2 * block.pairs > block.bytes:
            raise InputError(f"{path}: {shard.file} has no room for its pairs at byte {end}: {mend(path.parent)}")
        end += block.bytes
    pairs = sum(block.pairs for block in shard.blocks)
    if pairs != shard.pairs or end > shard.bytes or len(shard.block_checksums) != len(shard.blocks):
        raise InputError(f"{path}: blocks of {shard.file} do not add up to the shard: {mend(path.parent)}")
