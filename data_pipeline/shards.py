"""Block shards: a WebDataset tar whose sample is a block of many pairs, so a tar header is paid once per thousands.

Members of block NNNNNN, in this order: NNNNNN.src.npy, NNNNNN.src_len.npy, NNNNNN.tgt.npy, NNNNNN.tgt_len.npy: flat ids
of all pairs one after another (uint16, or uint32 above 65,535 ids) and their lengths (the smallest unsigned type that
fits), without EOS or any other special id. Beside each shard a lengths sidecar [pairs, 2] (source, target), so that
planning never opens a tar.

Reading trusts nothing: sizes and checksums come from the index, only the four plain .npy members are taken, whatever
a header claims is compared with the bytes that are there, and no decoder that could run code is ever called.
"""

import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import UNK
from data_pipeline.errors import DamagedError, InputError
from data_pipeline.files import open_regular, sha256_of, write_atomically, write_bytes_atomically
from data_pipeline.index import BlockPlace, Index, ShardEntry, mend
from data_pipeline.npy import LONGEST_HEADER, decode_npy, encode_npy
from data_pipeline.ragged import Integers, smallest_unsigned, starts_of

TAR_RECORD = 512
PARTS = ("src", "src_len", "tgt", "tgt_len")
_ONLY = "(only the four arrays of a block belong here)"
_PLAIN = re.compile(
    rb"(\d{6,20}\.(?:src|tgt)(?:_len)?\.npy)\0+0000644\0(?:0000000\0){2}([0-7]{11})\0(?:0{11}\0)"
    rb"([0-7]{6}\0 )0\0{100}ustar\x0000\0{247}"
)


@dataclass(frozen=True)
class Block:
    """Pairs as flat arrays: ids of all sources (targets) one after another, and the length of each, without EOS."""

    source: Integers
    source_lengths: Integers
    target: Integers
    target_lengths: Integers

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.source_lengths)


def _shrink(lengths: Integers) -> Integers:
    return lengths.astype(smallest_unsigned(int(lengths.max(initial=0))))


def write_shard(folder: Path, split: str, number: int, first_block: int, blocks: Iterable[Block]) -> ShardEntry:
    """Writes shard `number` of a split and its lengths sidecar; blocks are numbered from first_block over the split.

    The bytes depend on the blocks alone: no times, no owners. Raises OSError.
    """
    path = folder / f"{split}-{number:06d}.tar"
    lengths_path = folder / f"{split}-{number:06d}.lengths.npy"
    sizes: list[tuple[int, int]] = []
    lengths: list[NDArray[np.int64]] = []

    def write_tar(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for offset, block in enumerate(blocks):
                arrays = (block.source, _shrink(block.source_lengths), block.target, _shrink(block.target_lengths))
                members = {f"{part}.npy": encode_npy(array) for part, array in zip(PARTS, arrays, strict=True)}
                for name, data in members.items():
                    # Of mode 0o644, without owner and time, as TarInfo begins.
                    member = tarfile.TarInfo(f"{first_block + offset:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                size = sum(TAR_RECORD + -(-len(data) // TAR_RECORD) * TAR_RECORD for data in members.values())
                sizes.append((size, block.pairs))
                lengths.append(np.stack((block.source_lengths, block.target_lengths), axis=1).astype(np.int64))

    write_atomically(path, write_tar)
    table = np.concatenate(lengths)
    write_bytes_atomically(lengths_path, encode_npy(_shrink(table)))
    offsets = starts_of(np.array([size for size, _ in sizes]))
    places = tuple(BlockPlace(int(o), size, pairs) for o, (size, pairs) in zip(offsets, sizes, strict=False))
    source_tokens, target_tokens = (int(total) + len(table) for total in table.sum(axis=0))
    return ShardEntry(
        file=path.name,
        pairs=len(table),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        bytes=path.stat().st_size,
        checksum=sha256_of(path),
        blocks=places,
        block_checksums=tuple(zlib.crc32(segment) for segment in _segments(path, places)),
        lengths_file=lengths_path.name,
        lengths_checksum=sha256_of(lengths_path),
    )


def _segments(path: Path, places: Iterable[BlockPlace]) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for place in places:
            file.seek(place.offset)
            yield file.read(place.bytes)


class Segments(Protocol):
    """Where the blocks of a split's shards come from. mend: how to mend what is wrong with them."""

    mend: str

    def name(self, shard: ShardEntry) -> str:
        """What to call a shard's file."""
        ...

    def check(self, shard: ShardEntry) -> None:
        """Looks at presence and size of a shard as far as that is cheap. Raises InputError."""
        ...

    def read(self, shard: ShardEntry, inside: int, stop: Callable[[], bool] = lambda: False) -> bytes:
        """The bytes of block `inside` of a shard; fewer if the file ends before. What takes long is given up once
        stop() says True. Raises InputError, RunError, StoppedError."""
        ...

    def checksum(self, shard: ShardEntry) -> str:
        """sha256 of a shard's whole file, as it is now. Raises InputError, RunError."""
        ...


class LocalSegments:
    """Shards in a folder: blocks are read by `pread`, not mapped, so that a file that is cut short is one sentence."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mend = mend(folder)

    def name(self, shard: ShardEntry) -> str:
        """Its path."""
        return str(self._folder / shard.file)

    def check(self, shard: ShardEntry) -> None:
        """Presence and size."""
        path = self._folder / shard.file
        try:
            size = path.stat().st_size
        except OSError as fault:
            raise unreadable(f"shard {path}", fault, self.mend) from None
        if size != shard.bytes:
            kind = "truncated" if size < shard.bytes else "too long"
            raise DamagedError(f"shard {path} is {kind} ({size} of {shard.bytes} bytes): {self.mend}")

    def read(self, shard: ShardEntry, inside: int, stop: Callable[[], bool] = lambda: False) -> bytes:
        """See `Segments`."""
        place, path = shard.blocks[inside], self._folder / shard.file
        try:
            with open_regular(path) as file:
                return os.pread(file.fileno(), place.bytes, place.offset)
        except OSError as fault:
            raise unreadable(f"shard {path}", fault, self.mend) from None

    def checksum(self, shard: ShardEntry) -> str:
        """See `Segments`."""
        path = self._folder / shard.file
        try:
            return sha256_of(path)
        except OSError as fault:
            raise unreadable(f"shard {path}", fault, self.mend) from None


def unreadable(where: str, fault: OSError, mending: str) -> InputError:
    """The error for a file that is missing (damage, to be mended as `mending` says) or cannot be read."""
    if isinstance(fault, FileNotFoundError):
        return DamagedError(f"{where} is missing: {mending}")
    return InputError(
        f"{where} cannot be read ({fault.strerror or fault}): check its permissions and its disk, then run the same "
        "command again"
    )


class ShardReader:
    """The shards of one split. Safe to use from several threads.

    blocks: number of blocks in all shards; block_pairs [blocks]: pairs of each; block_starts [blocks + 1]: number of
    the first pair of each. lengths [pairs, 2]: source and target length of every pair, without EOS (a byte each up to
    length 255, so 72 MB for the 36 million pairs of WMT14 En-Fr). mend: how to mend what is wrong with them.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        tokenizer_checksum: str | None = None,
        segments: Segments | None = None,
        check: bool = True,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        """Opens the shards that `index` (of `folder`) names: presence and size of every file are checked, lengths read.

        tokenizer_checksum: what the shards must have been encoded with; segments: where the blocks are, if not in
        `folder`; check: whether a shard that is missing or cut short is to be met here, not when it is read; sizes:
        of the target's and the source's vocabulary, if they differ. Raises InputError.
        """
        self._segments = LocalSegments(folder) if segments is None else segments
        self.mend = self._segments.mend
        self._sizes = (index.vocab_size, index.vocab_size) if sizes is None else sizes
        self.folder = folder
        self.index = index
        if tokenizer_checksum is not None and index.tokenizer_checksum != tokenizer_checksum:
            raise InputError(
                f"the shards in {folder} were encoded with tokenizer {index.tokenizer_checksum[:12]}, but this one is "
                f"{tokenizer_checksum[:12]}: use the tokenizer that prepare wrote beside them, or other shards"
            )
        if not index.shards:
            raise InputError(f"{folder} holds no pairs: {self.mend}")
        for shard in index.shards if check else ():
            self._segments.check(shard)
        self.lengths: Integers = np.concatenate([self._read_lengths(shard) for shard in index.shards])
        self._places = [(shard, i) for shard in index.shards for i in range(len(shard.blocks))]
        self.blocks = len(self._places)
        self.block_pairs = np.array([shard.blocks[i].pairs for shard, i in self._places], dtype=np.int64)
        self.block_starts = starts_of(self.block_pairs)

    def _read_lengths(self, shard: ShardEntry) -> Integers:
        path = self.folder / shard.lengths_file
        where = f"lengths sidecar {path}"
        # A longer file is not read to its end: its beginning has another checksum.
        longest = LONGEST_HEADER + shard.pairs * 2 * np.dtype(np.uint32).itemsize
        try:
            with open_regular(path) as file:
                data = file.read(longest)
        except OSError as fault:
            raise unreadable(where, fault, self.mend) from None
        if hashlib.sha256(data).hexdigest() != shard.lengths_checksum:
            raise InputError(f"{where} does not match the index: {self.mend}")
        try:
            lengths = decode_npy(data, dimensions=2)
        except ValueError as fault:
            raise InputError(f"{where} {fault}: {self.mend}") from None
        if lengths.shape != (shard.pairs, 2):
            raise InputError(f"{where} holds {lengths.shape}, expected ({shard.pairs}, 2): {self.mend}")
        # At most 32 bits each, so that these sums cannot wrap.
        totals = lengths.sum(axis=0, dtype=np.int64) + shard.pairs
        if totals.tolist() != [shard.source_tokens, shard.target_tokens]:
            raise InputError(
                f"{where} holds {totals[0]} source and {totals[1]} target tokens, the index says "
                f"{shard.source_tokens} and {shard.target_tokens}: {self.mend}"
            )
        return lengths

    def name(self, shard: ShardEntry) -> str:
        """What to call a shard's file: its path or URL."""
        return self._segments.name(shard)

    def checksum(self, shard: ShardEntry) -> str:
        """sha256 of a shard's whole file, as it is now. Raises InputError, RunError."""
        return self._segments.checksum(shard)

    def block(self, number: int, stop: Callable[[], bool] = lambda: False) -> Block:
        """Reads and checks one block. Raises InputError that names shard, block and byte offset; StoppedError if it is
        given up because stop() says True."""
        shard, inside = self._places[number]
        place = shard.blocks[inside]
        data = self._segments.read(shard, inside, stop)
        try:
            if len(data) != place.bytes:
                raise ValueError(f"truncated ({len(data)} of {place.bytes} bytes)")
            if zlib.crc32(data) != shard.block_checksums[inside]:
                raise ValueError("damaged (its checksum differs from the index)")
            block = decode_block(data, *self._sizes)
            first = self.block_starts[number]
            expected = self.lengths[first : first + place.pairs]
            found = (block.source_lengths, block.target_lengths)
            if any(not np.array_equal(expected[:, i], found[i]) for i in (0, 1)):
                raise ValueError(f"its lengths differ from the sidecar {shard.lengths_file}")
        except ValueError as fault:
            where = f"{self._segments.name(shard)}, block {number} at byte {place.offset}"
            raise DamagedError(f"{where}: {fault}: {self.mend}") from None
        return block


def decode_block(segment: bytes, vocab_size: int, source_vocab_size: int | None = None) -> Block:
    """The block in a tar segment (a run of whole members, of one sample). Raises ValueError for anything else.

    Nothing in the segment is executed: members are taken by exact name and decoded as plain arrays of integers, and
    none takes more memory than its own bytes. The arrays are read-only views of the segment.
    """
    arrays: list[Integers] = []
    for member, data in _members(segment):
        if len(arrays) == len(PARTS) or member.partition(".")[2] != f"{PARTS[len(arrays)]}.npy":
            raise ValueError(f"unexpected member {member!r} {_ONLY}")
        try:
            arrays.append(decode_npy(data, dimensions=1))
        except ValueError as fault:
            raise ValueError(f"member {member!r} {fault}") from None
    if len(arrays) != len(PARTS):
        raise ValueError(f"holds {len(arrays)} of the {len(PARTS)} arrays of a block")
    block = Block(*arrays)
    for side, flat, lengths, size in (
        ("source", block.source, block.source_lengths, source_vocab_size or vocab_size),
        ("target", block.target, block.target_lengths, vocab_size),
    ):
        # At most 32 bits each, so that the sum cannot wrap.
        if int(lengths.sum(dtype=np.int64)) != len(flat):
            raise ValueError(f"{side} lengths do not add up to its {len(flat)} ids")
        if len(flat) and (int(flat.min()) < UNK or int(flat.max()) >= size):
            raise ValueError(f"{side} ids lie outside [{UNK}, {size})")
    return block


def _members(segment: bytes) -> Iterator[tuple[str, memoryview]]:
    """(name, content) of each member of a tar segment. Raises ValueError for members that are no plain files.

    Headers are parsed one record at a time: tarfile's own reader follows extended headers, sparse maps and sizes
    wherever they lead, which is more than these members need.
    """
    view, position = memoryview(segment), 0
    # Empty records end an archive.
    while position < len(segment) and any(header := segment[position : position + TAR_RECORD]):
        name, size = _plain_header(header) or _any_header(header)
        position += TAR_RECORD
        if not 0 <= size <= len(segment) - position:
            raise ValueError(f"member {name!r} claims {size} bytes of the {len(segment) - position} left")
        yield name, view[position : position + size]
        position += -(-size // TAR_RECORD) * TAR_RECORD


def _plain_header(header: bytes) -> tuple[str, int] | None:
    """(name, size) in a header that is byte for byte as `write_shard` makes them; None for any other."""
    if (match := _PLAIN.fullmatch(header)) is None:
        return None
    # The sum counts its own field as spaces.
    total = sum(header) - sum(match[3]) + len(match[3]) * ord(" ")
    return (match[1].decode(), int(match[2], 8)) if match[3] == b"%06o\0 " % total else None


def _any_header(header: bytes) -> tuple[str, int]:
    """(name, size) in the header of a plain file, as tarfile understands it. Raises ValueError for anything else."""
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as fault:
        raise ValueError(f"not a tar segment ({fault})") from None
    if member.type != tarfile.REGTYPE:
        raise ValueError(f"unexpected member {member.name!r} {_ONLY}")
    return member.name, member.size
