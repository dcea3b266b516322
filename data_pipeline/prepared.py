"""A prepared data set, opened: its tokenizer and both splits, checked against each other."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import InputError
from data_pipeline.index import INDEX_FILE, read_index
from data_pipeline.shards import ShardReader
from data_pipeline.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.model"
TRAIN, VALID = "train", "valid"


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


def open_prepared(folder: Path) -> PreparedData:
    """Opens the shards of data.shards. Presence and size of every file, the lengths and the tokenizer are checked here,
    blocks when they are read. Raises InputError."""
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
    readers = {split: ShardReader(folder / split, index, tokenizer.checksum) for split, index in indexes.items()}
    return PreparedData(folder, fingerprint, tokenizer, readers[TRAIN], readers[VALID])
