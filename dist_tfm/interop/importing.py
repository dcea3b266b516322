"""From a folder of another program to a run directory with one checkpoint, of weights alone, at step 0."""

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.vocabularies import ids_file, separate_file
from dist_tfm.checkpoint.canonical import Entry, Index, Part, write_tensors
from dist_tfm.checkpoint.layout import TEMPORARY, TOKENIZER, state_file, step_dir
from dist_tfm.checkpoint.manager import Accompanying, make_anew, publish_checkpoint
from dist_tfm.config.loading import config_to_yaml
from dist_tfm.config.schema import Config, DecodeConfig, TokenizerConfig
from dist_tfm.errors import InputError
from dist_tfm.interop.marian import from_marian
from dist_tfm.interop.pieces import pieces_of_folder, read_piece_ids, unknown_id
from dist_tfm.interop.reading import SETTINGS, read_settings, read_tensors
from dist_tfm.interop.t5 import from_t5
from dist_tfm.interop.translation import Imported
from dist_tfm.parallel.collectives import Json

T5_FAMILY = ("t5", "mt5", "umt5")
SIDES = ("source.model", "target.model")
"""Files beside the checkpoints: the vocabulary of each side, where they have one each."""


class Summary(NamedTuple):
    """What was imported: kind of model, its checkpoint, parameters, tokens, kind of tokenizer."""

    kind: str
    checkpoint: Path
    parameters: int
    tokens: int
    tokenizer: str


def import_model(folder: Path, output: Path, as_ids: bool = False) -> Summary:
    """Writes the model in `folder` as a run directory `output`, which must not hold a checkpoint.

    as_ids: text is ids between blanks, even if the folder has SentencePiece models. Raises InputError, OSError.
    """
    checkpoint = step_dir(output, 0)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: expected no such directory, or an empty one, found something in it: name another")
    settings = read_settings(folder)
    imported = _translate(settings, folder)
    pieces = None if as_ids else pieces_of_folder(folder, imported.order)
    imported = _with_sources_apart(imported) if pieces and pieces[0] != pieces[1] else imported
    tokenizer, content = _tokenizer(imported, pieces, output)
    output.mkdir(parents=True, exist_ok=True)
    if pieces and pieces[0] != pieces[1]:
        for name, side in zip(SIDES, pieces, strict=True):
            (output / name).write_bytes(side)
    config = Config(model=imported.config, tokenizer=tokenizer, decode=DecodeConfig())
    origin = {"kind": str(settings["model_type"]), "from": str(folder)}
    _write(checkpoint, imported, config_to_yaml(config), content, origin)
    count = sum(weight.numel() for weight in imported.weights.values())
    return Summary(origin["kind"], checkpoint, count, len(imported.order), tokenizer.kind)


def _translate(settings: dict[str, Any], folder: Path) -> Imported:
    kind = settings.get("model_type")
    if kind == "marian":
        unknown = unknown_id(read_piece_ids(folder))
        return from_marian(settings, read_tensors(folder), unknown, str(folder))
    if kind in T5_FAMILY:
        return from_t5(settings, read_tensors(folder), str(folder))
    known = ", ".join(("marian", *T5_FAMILY))
    raise InputError(f"{folder / SETTINGS}: expected model_type to be one of {known}, found {kind!r}")


def _with_sources_apart(imported: Imported) -> Imported:
    """Two vocabularies have no token in common that training could count on: the source gets a matrix of its own."""
    apart = {"all": "decoder", "inputs": "none"}.get(imported.config.tied)
    if apart is None:
        return imported
    config = dataclasses.replace(imported.config, tied=apart)  # type: ignore[arg-type]
    copied = {"source_embedding.weight": imported.weights["embedding.weight"]}
    return dataclasses.replace(imported, config=config, weights={**imported.weights, **copied})


def _tokenizer(imported: Imported, pieces: tuple[bytes, bytes] | None, output: Path) -> tuple[TokenizerConfig, bytes]:
    """Section `tokenizer` with which prepare makes the same tokenizer, and its file's content. Raises InputError."""
    size = len(imported.order)
    if pieces is None:
        if size < 300:
            raise InputError(f"expected a vocabulary of 300 tokens or more, found {size}")
        return TokenizerConfig(kind="ids", vocab_size=size), ids_file(size)
    if pieces[0] == pieces[1]:
        model = str(step_dir(output, 0) / TOKENIZER)
        return TokenizerConfig(kind="sentencepiece", model=model, vocab_size=max(300, size)), pieces[0]
    source, target = (str(output / name) for name in SIDES)
    config = TokenizerConfig(
        kind="sentencepiece", model=source, target_model=target, shared=False, vocab_size=max(300, size)
    )
    return config, separate_file(*pieces)


def _write(checkpoint: Path, imported: Imported, config: str, tokenizer: bytes, origin: dict[str, str]) -> None:
    temporary = checkpoint.with_name(checkpoint.name + TEMPORARY)
    make_anew(temporary)
    file = state_file(0, 1)
    weights = imported.weights
    index: Index = {
        name: Entry(tuple(value.shape), 0, (Part(file, 0, len(value), 0, math.prod(value.shape)),))
        for name, value in weights.items()
    }
    try:
        keys = [(f"fp32/{name}", value.numel()) for name, value in weights.items()]
        record = write_tensors(temporary / file, keys, (value.flatten() for value in weights.values()))
        with tempfile.TemporaryDirectory() as scratch:
            given = Path(scratch) / TOKENIZER
            given.write_bytes(tokenizer)
            counters: dict[str, Json] = {"step": 0, "updates": 0, "imported": {**origin}}
            publish_checkpoint(checkpoint, temporary, {file: record}, index, Accompanying(counters, config, given))
    except BaseException:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
