"""From parts and held-out text to shards and indexes: the second half of preparation, resumable at every file."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from data_pipeline.api import SPECIAL_IDS
from data_pipeline.clean import CleaningReport
from data_pipeline.encode import Encoder, Piece
from data_pipeline.errors import InputError
from data_pipeline.files import write_bytes_atomically, write_json_atomically
from data_pipeline.index import FORMAT_VERSION, Index, ShardEntry
from data_pipeline.parts import EncodedPairs, Part, merge_slices
from data_pipeline.ragged import starts_of
from data_pipeline.shards import Block, write_shard
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.validation import SOURCE_TEXT, TARGET_TEXT

NAMED_LINES = 5
"""Lines of long held-out pairs that a report names at most."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How pairs are laid out in shards: the shard keys of section `data`."""

    pairs_per_block: int
    pairs_per_shard: int

    @property
    def blocks_per_shard(self) -> int:
        """Blocks of a full shard."""
        return -(-self.pairs_per_shard // self.pairs_per_block)


def blocks_of(pairs: EncodedPairs, size: int) -> Iterator[Block]:
    """Cuts pairs into blocks of `size`, the last one smaller."""
    source_starts, target_starts = starts_of(pairs.source_lengths), starts_of(pairs.target_lengths)
    for first in range(0, len(pairs.keys), size):
        last = min(first + size, len(pairs.keys))
        yield Block(
            pairs.source[source_starts[first] : source_starts[last]],
            pairs.source_lengths[first:last],
            pairs.target[target_starts[first] : target_starts[last]],
            pairs.target_lengths[first:last],
        )


def write_train_shards(
    parts: Sequence[Part], folder: Path, work: Path, layout: Layout, done: Callable[[int], None]
) -> tuple[ShardEntry, ...]:
    """Merges the parts into globally shuffled shards of `folder`; done(pairs) after each. Raises OSError.

    A shard that an interrupted preparation has finished is recognised by its entry in `work` and kept.
    """
    keys = np.concatenate([part.keys for part in parts])
    keys.sort()
    firsts = keys[:: layout.pairs_per_shard].tolist()
    # Eight bytes a pair, of which no more is needed than the first one of each shard.
    del keys
    entries: list[ShardEntry] = []
    for number, (low, high) in enumerate(zip(firsts, [*firsts[1:], 1 << 64], strict=True)):
        noted = work / f"{folder.name}-{number:06d}.json"
        entry = _finished(noted, folder)
        if entry is None:
            pairs = merge_slices([part.between(low, high) for part in parts])
            blocks = blocks_of(pairs, layout.pairs_per_block)
            entry = write_shard(folder, folder.name, number, number * layout.blocks_per_shard, blocks)
            write_json_atomically(noted, dataclasses.asdict(entry))
        entries.append(entry)
        done(entry.pairs)
    return tuple(entries)


def _finished(noted: Path, folder: Path) -> ShardEntry | None:
    """The entry of a shard that was written whole before an interruption."""
    if not noted.is_file():
        return None
    entry = TypeAdapter(ShardEntry).validate_json(noted.read_bytes())
    whole = (folder / entry.file).is_file() and (folder / entry.lengths_file).is_file()
    return entry if whole and (folder / entry.file).stat().st_size == entry.bytes else None


@dataclasses.dataclass(frozen=True)
class LongPairs:
    """Held-out pairs with a side longer than data.max_length: how many, the tokens of the longest side (without EOS),
    and the lines of the longest pairs in the corpus files (from 1), the longest first."""

    pairs: int
    longest: int
    lines: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class HeldOutSplit:
    """The held-out split as it was written. texts: sha256 of each text file."""

    shards: tuple[ShardEntry, ...]
    texts: dict[str, str]
    report: CleaningReport
    long: LongPairs


def write_valid_shards(pieces: Iterator[Piece], encoder: Encoder, folder: Path, layout: Layout) -> HeldOutSplit:
    """Writes the held-out split in its own order, with its text; of pairs too long for training none is left out.

    Raises InputError if nothing but blank pairs is there, OSError.
    """
    report = CleaningReport()
    encoded = [encoder.encode(piece) for piece in pieces]
    for piece in encoded:
        report.add(piece.report)
    texts = [pair for piece in encoded for pair in piece.texts]
    if not texts:
        raise InputError(f"all {report.read} validation pairs are blank: expected text in data.valid_{{source,target}}")
    fields = [field.name for field in dataclasses.fields(EncodedPairs)]
    joined = EncodedPairs(**{name: np.concatenate([getattr(e.pairs, name) for e in encoded]) for name in fields})
    blocks = list(blocks_of(joined, layout.pairs_per_block))
    shards = tuple(
        write_shard(folder, folder.name, number, first, blocks[first : first + layout.blocks_per_shard])
        for number, first in enumerate(range(0, len(blocks), layout.blocks_per_shard))
    )
    checksums: dict[str, str] = {}
    for side, name in enumerate((SOURCE_TEXT, TARGET_TEXT)):
        content = "".join(pair[side] + "\n" for pair in texts).encode()
        write_bytes_atomically(folder / name, content)
        checksums[name] = hashlib.sha256(content).hexdigest()
    lines = np.concatenate([piece.lines for piece in encoded])
    return HeldOutSplit(shards, checksums, report, _long_pairs(joined, lines, encoder.rules.max_length))


def _long_pairs(pairs: EncodedPairs, lines: NDArray[np.int64], max_length: int) -> LongPairs:
    longer = np.maximum(pairs.source_lengths, pairs.target_lengths).astype(np.int64)
    ranked = np.argsort(-longer, kind="stable")
    ranked = ranked[longer[ranked] > max_length]
    longest = int(longer[ranked[0]]) if len(ranked) else 0
    return LongPairs(len(ranked), longest, tuple((lines[ranked[:NAMED_LINES]] + 1).tolist()))


def make_index(
    split: str, fingerprint: str, tokenizer: Tokenizer, shards: tuple[ShardEntry, ...], texts: dict[str, str]
) -> Index:
    """The index of one split."""
    return Index(
        format_version=FORMAT_VERSION,
        tokenizer_checksum=tokenizer.checksum,
        vocab_size=tokenizer.vocab_size,
        special_ids=dict(SPECIAL_IDS),
        fingerprint=fingerprint,
        split=split,
        shards=shards,
        texts=texts,
    )
