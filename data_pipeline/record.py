"""DATA.json: what a folder of shards was prepared from. By it a folder is recognised as ours, and as the right one.

The fingerprint covers what decides the shards' bytes and nothing else: the text of the corpus, the cleaning, the
tokenizer and the shard keys, and data.shuffle_seed.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from data_pipeline import clean
from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.errors import InputError, shorten
from data_pipeline.files import TEMPORARY, read_regular, write_json_atomically
from data_pipeline.index import FORMAT_VERSION
from data_pipeline.sides import measure_side, stat_side
from data_pipeline.sources import resolve, unequal_sides
from data_pipeline.steps import HeldOut, find, steps_to_json
from data_pipeline.tokenizer_training import model_checksum

RECORD_FILE = "DATA.json"
LOCK_FILE = ".lock"
CORPUS_KEYS = ("train_source", "train_target", "valid_source", "valid_target")
_CLEANING_KEYS = ("max_length", "max_ratio")
_EXPECTED = {"sentencepiece": "a SentencePiece model", "words": "a vocabulary, one token a line"}
_SHARD_KEYS = ("pairs_per_block", "pairs_per_shard", "shuffle_seed")


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """A corpus file as it was read: while name, size and time stay, its checksum is not computed again."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: str
    size: int
    modified_ns: int
    sha256: str
    lines: int


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of DATA.json. ingredients: dotted key to the value that the fingerprint covers."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    fingerprint: str
    ingredients: dict[str, str | int | float]
    corpus: dict[str, CorpusFile]


def read_record(folder: Path) -> Record | None:
    """The record of `folder`; None if nothing has been prepared there. Raises InputError for a foreign folder."""
    path = folder / RECORD_FILE
    try:
        return TypeAdapter(Record).validate_json(read_regular(path))
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"{path} is not the record of a preparation ({place}: {first['msg']}): delete {folder} or choose another "
            "data.shards"
        ) from None
    except NotADirectoryError:
        raise InputError(f"{folder} is not a folder: choose another data.shards") from None
    except FileNotFoundError:
        pass
    except OSError as fault:
        raise InputError(f"{path} cannot be read: {fault.strerror or fault}") from None
    ours = (LOCK_FILE, RECORD_FILE + TEMPORARY)
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours) if folder.is_dir() else []
    if foreign:
        raise InputError(
            f"{folder} holds something else ({', '.join(foreign[:3])}): expected no folder, an empty one, or prepared "
            "shards; choose another data.shards"
        )
    return None


def write_record(folder: Path, record: Record) -> None:
    """Marks `folder` as ours. Raises OSError."""
    write_json_atomically(folder / RECORD_FILE, dataclasses.asdict(record))


def make_record(data: DataConfig, tokenizer: TokenizerConfig, known: Record | None) -> Record:
    """What preparing this configuration would record, having read every corpus file that `known` does not vouch for.

    A corpus file that is not there counts as unchanged if `known` recorded one of the same name: shards can be trained
    on without their corpus. Raises InputError.
    """
    corpus: dict[str, CorpusFile] = {}
    names = _corpus_names(data)
    for key, name in names.items():
        corpus[key] = _corpus_file(name, known.corpus.get(key) if known is not None else None)
    for source_key, target_key in zip(*[iter(names)] * 2, strict=True):
        source, target = corpus[source_key], corpus[target_key]
        if source.lines != target.lines:
            raise unequal_sides(_shown(source.name), source.lines, _shown(target.name), target.lines)
    ingredients: dict[str, str | int | float] = {
        "format_version": FORMAT_VERSION,
        "cleaning_rules": clean.RULES,
        "data.clean": steps_to_json(data.clean),
        **{f"data.{key}": file.sha256 for key, file in corpus.items()},
        **{f"data.{key}": getattr(data, key) for key in (*_CLEANING_KEYS, *_SHARD_KEYS)},
        **{f"tokenizer.{key}": value for key, value in dataclasses.asdict(tokenizer).items()},
        # 5 and 5.0 are the same setting, and must be the same JSON.
        "data.max_ratio": float(data.max_ratio),
        "tokenizer.character_coverage": float(tokenizer.character_coverage),
        "tokenizer.shared": int(tokenizer.shared),
        **{f"tokenizer.{key}": _model_checksum(tokenizer, key, known) for key in ("model", "target_model")},
    }
    canonical = json.dumps(ingredients, sort_keys=True).encode()
    return Record(hashlib.sha256(canonical).hexdigest(), ingredients, corpus)


def _corpus_names(data: DataConfig) -> dict[str, str]:
    """Key to name of every side that is read: those of CORPUS_KEYS, then the test sets that cleaning looks at. Source
    and target follow one another."""
    names = {key: getattr(data, key) for key in CORPUS_KEYS}
    held_out: HeldOut | None = find(data.clean, HeldOut)
    for number, test in enumerate(held_out.test if held_out is not None else ()):
        names |= {
            f"clean.held_out.test.{number}.source": test.source,
            f"clean.held_out.test.{number}.target": test.target,
        }
    return names


def _model_checksum(tokenizer: TokenizerConfig, key: str, known: Record | None) -> str:
    """Of the tokenizer that is taken over; like a corpus, it counts as unchanged when it is not there any more."""
    name: str = getattr(tokenizer, key)
    checksum = model_checksum(name)
    if checksum is None and known is not None:
        return str(known.ingredients.get(f"tokenizer.{key}", ""))
    if checksum is None:
        raise InputError(f"tokenizer.{key} {name} not found: expected {_EXPECTED[tokenizer.kind]}")
    return checksum


def _shown(name: str) -> str:
    return str(resolve(name))


def _corpus_file(name: str, known: CorpusFile | None) -> CorpusFile:
    stat = stat_side(name)
    if known is not None and known.name == name and stat in (None, (known.size, known.modified_ns)):
        return known
    facts = measure_side(name)
    size, modified = stat if stat is not None else (0, 0)
    return CorpusFile(name, size, modified, facts.sha256, facts.lines)


def check_same(folder: Path, known: Record, asked: Record) -> None:
    """Raises InputError, naming what differs, if `folder` was prepared from something else."""
    if known.fingerprint == asked.fingerprint:
        return
    was, now = known.ingredients, asked.ingredients
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    texts = {f"data.{key}" for key in (*known.corpus, *asked.corpus)}
    differences = "; ".join(
        f"the text of {key} differs"
        if key in texts
        else f"{key} was {shorten(str(was.get(key)))} there and is {shorten(str(now.get(key)))} here"
        for key in keys
    )
    raise InputError(
        f"{folder} was prepared from something else ({differences or 'its fingerprint is another'}): choose another "
        "data.shards, or delete that folder"
    )
