"""Prepared data sets, opened: tokenizer and both splits of each, checked against each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.api import CorpusConfig, DataConfig
from data_pipeline.block_cache import GIGABYTE, BlockCache, cache_folder
from data_pipeline.cells import Part
from data_pipeline.errors import ConfigError, InputError
from data_pipeline.index import INDEX_FILE, read_index
from data_pipeline.remote import Remote, is_remote
from data_pipeline.remote_shards import RemoteSegments, copy_small_files
from data_pipeline.shards import Segments, ShardReader
from data_pipeline.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.model"
TRAIN, VALID = "train", "valid"

SegmentsOf = Callable[[str], Segments]
"""From the name of a split to where its blocks are."""


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` has written into a folder. fingerprint: of everything that its bytes depend on."""

    folder: Path
    fingerprint: str
    tokenizer: Tokenizer
    train: ShardReader
    valid: ShardReader


def is_complete(folder: Path) -> bool:
    """Whether preparation has ended there: the indexes are the last files that it writes."""
    return all((folder / split / INDEX_FILE).is_file() for split in (TRAIN, VALID))


def open_prepared(folder: Path, segments: SegmentsOf | None = None, skip_damaged: bool = False) -> PreparedData:
    """Opens the shards of a folder. Presence and size of every file, the lengths and the tokenizer are checked here,
    blocks when they are read. segments: where the blocks are, if not there; skip_damaged: shards of the
    training split may be missing or cut short. Raises InputError."""
    indexes = {split: read_index(folder / split) for split in (TRAIN, VALID)}
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    fingerprint = indexes[TRAIN].fingerprint
    for split, index in indexes.items():
        where = folder / split / INDEX_FILE
        if index.split != split:
            raise InputError(f"{where} is the index of split {index.split!r}, expected {split!r}: run prepare again")
        if index.fingerprint != fingerprint:
            raise InputError(f"{where} belongs to other shards than the training split: delete {folder}, run prepare")
        if index.vocab_size != tokenizer.vocab_size and index.tokenizer_checksum == tokenizer.checksum:
            raise InputError(
                f"{where} names {index.vocab_size} ids, its tokenizer has {tokenizer.vocab_size}: delete {folder}, run "
                "prepare"
            )
    readers = {
        split: ShardReader(
            folder / split,
            index,
            tokenizer.checksum,
            None if segments is None else segments(split),
            check=not (skip_damaged and split == TRAIN),
            sizes=tokenizer.sizes,
        )
        for split, index in indexes.items()
    }
    return PreparedData(folder, fingerprint, tokenizer, readers[TRAIN], readers[VALID])


def locate(location: str, data: DataConfig) -> tuple[Path, SegmentsOf | None]:
    """The folder of shards that data.shards names, and where their blocks are if they are not there: those behind a URL
    are opened as a copy of their small files. Raises ConfigError, InputError, RunError."""
    if not is_remote(location):
        return Path(location), None
    remote, folder = Remote(location), cache_folder(data.cache)
    cache = BlockCache(folder, data.cache_gigabytes * GIGABYTE)
    copy = copy_small_files(remote, folder, (TRAIN, VALID), TOKENIZER_FILE)
    return copy, lambda split: RemoteSegments(remote, split, cache)


def location_faults(data: DataConfig) -> list[str]:
    """Faults of the places that shards are said to be at."""
    places = {"data.shards": data.shards, **{f"data.corpora ({c.name})": c.shards for c in data.corpora}}
    faults = []
    for key, location in places.items():
        try:
            is_remote(location)
        except ConfigError as fault:
            faults.append(f"{key}: {fault}")
    return faults


def corpus_location(data: DataConfig, corpus: CorpusConfig) -> str:
    """Where the shards of one corpus of a mixture are: a folder or a URL."""
    return corpus.shards or f"{data.shards.rstrip('/')}/{corpus.name}"


def open_corpora(data: DataConfig) -> list[PreparedData]:
    """The data sets of a mixture in their order, or the one of data.shards. All must have been encoded with the same
    tokenizer. Raises InputError."""
    locations = [corpus_location(data, corpus) for corpus in data.corpora] or [data.shards]
    opened = [open_prepared(*locate(location, data), data.on_error == "skip") for location in locations]
    first = opened[0]
    for other in opened[1:]:
        if other.tokenizer.checksum != first.tokenizer.checksum:
            raise InputError(
                f"{first.folder} was encoded with tokenizer {first.tokenizer.checksum[:12]}, {other.folder} with "
                f"{other.tokenizer.checksum[:12]}: the corpora of a mixture need one tokenizer, prepare them with it"
            )
    return opened


def training_parts(data: DataConfig, opened: Sequence[PreparedData]) -> list[Part]:
    """The training split of each corpus of a mixture, as opened by `open_corpora`."""
    return _parts(data, opened, [prepared.train for prepared in opened], range(len(opened)))


def held_out_parts(data: DataConfig, opened: Sequence[PreparedData]) -> list[Part]:
    """The held-out splits to validate on: of a mixture those of its `valid` corpora, else the one there is."""
    if not data.corpora:
        return [Part(opened[0].valid)]
    numbers = [number for number, corpus in enumerate(data.corpora) if corpus.valid]
    return _parts(data, opened, [opened[number].valid for number in numbers], numbers)


def _parts(
    data: DataConfig, opened: Sequence[PreparedData], readers: Sequence[ShardReader], numbers: Sequence[int]
) -> list[Part]:
    parts: list[Part] = []
    first_id = 0
    for reader, number in zip(readers, numbers, strict=True):
        corpus = data.corpora[number]
        (tag,) = opened[number].tokenizer.encode([corpus.tag])
        parts.append(Part(reader, corpus.name, tuple(tag), number, first_id))
        first_id += reader.index.pairs
    return parts
