"""A prepared corpus as one data-parallel rank sees it: tokenizer, training steps, held-out pairs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.api import Position
from data_pipeline.loader import BlockLoader, MixtureLoader, StepLoader
from data_pipeline.mixture import Draw, shares_of
from data_pipeline.prepared import TOKENIZER_FILE, PreparedData, held_out_parts, open_corpora, training_parts
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.validation import ValidationBatches, read_texts
from dist_tfm.config.schema import Config
from dist_tfm.errors import InputError
from dist_tfm.parallel.collectives import Group
from dist_tfm.training.validation import HeldOut


@dataclass(frozen=True)
class Corpus:
    """All that training and validation read. held_out has the batches of `validation`; checksum stands for what the
    indexes of all shards say."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    loader: StepLoader
    held_out: HeldOut
    validation: ValidationBatches
    description: str
    checksum: str


def open_corpus(config: Config, data: Group, start: Position) -> Corpus:
    """Opens the shards of data.shards, or of data.corpora, for rank data.rank of data.size; the first step is the one
    at `start`.

    Raises InputError.
    """
    opened = open_corpora(config.data)
    tokenizer = opened[0].tokenizer
    if config.model.tied in ("all", "inputs") and not tokenizer.is_shared:
        raise InputError(
            f"{opened[0].folder} has a vocabulary for each side, which one matrix (model.tied="
            f"{config.model.tied}) cannot embed: set "
            "model.tied to decoder or none, or take shards with one vocabulary"
        )
    loader, shares = _open_loader(config, opened, data, start)
    parts = held_out_parts(config.data, opened)
    validation = ValidationBatches(parts, loader.budget, data.rank, data.size)
    _check_positions(config, max(loader.longest, validation.longest))
    texts = [read_texts(part.reader.folder, part.reader.index) for part in parts]
    indexes = [prepared.train.index for prepared in opened]
    source_tokens, target_tokens = (sum(side) for side in zip(*(index.tokens for index in indexes), strict=True))
    long = ""
    if validation.longest > loader.longest:
        long = f" (the longest has {validation.longest:,} tokens, against {loader.longest:,} in training)"
    left_out = f"; {loader.left_out} longer than a micro-batch are left out" if loader.left_out else ""
    return Corpus(
        tokenizer=tokenizer,
        tokenizer_file=opened[0].folder / TOKENIZER_FILE,
        loader=loader,
        held_out=HeldOut(
            batches=list(validation),
            pairs=validation.pairs,
            sources=[line for sources, _ in texts for line in sources],
            references=[line for _, references in texts for line in references],
            corpora={part.number: part.name for part in parts if part.name},
        ),
        validation=validation,
        description=(
            f"data: {sum(index.pairs for index in indexes):,} pairs ({source_tokens:,} + {target_tokens:,} tokens), "
            f"{_vocabulary(tokenizer)}, held out {validation.pairs:,}{long}{left_out}{_reading(loader)}"
            f"{shares}"
        ),
        checksum=_checksum_of(opened),
    )


def _check_positions(config: Config, longest: int) -> None:
    """What shards hold may be longer than data.max_length: held-out pairs are never cut, and a tag is added later."""
    if config.model.positions == "learned" and longest > config.model.max_positions:
        raise InputError(
            f"model.max_positions: expected at least the {longest} tokens of the longest pair (with its EOS, and its "
            f"tag if it has one), also of the held-out ones, found {config.model.max_positions}"
        )


def _open_loader(
    config: Config, opened: Sequence[PreparedData], data: Group, start: Position
) -> tuple[StepLoader, str]:
    """The loader of one corpus or of data.corpora, and what to say of the shares of these."""
    if not config.data.corpora:
        return BlockLoader(opened[0].train, config.data, config.train.seed, data.rank, data.size, start), ""
    parts = training_parts(config.data, opened)
    tokens = [sum(part.reader.index.tokens) for part in parts]
    shares = shares_of([corpus.weight for corpus in config.data.corpora], tokens, config.data.temperature)
    draw = Draw(shares, config.data.micro_batches, config.data.lanes, config.train.seed)
    loader = MixtureLoader(parts, draw, config.data, config.train.seed, data.rank, data.size, start)
    listed = ", ".join(
        f"{part.name} {share:.2%} ({part.reader.index.pairs:,} pairs)"
        for part, share in zip(parts, shares, strict=True)
    )
    return loader, f"; mixture: {listed}"


def _vocabulary(tokenizer: Tokenizer) -> str:
    if tokenizer.is_shared:
        return f"vocabulary {tokenizer.vocab_size:,}"
    target, source = tokenizer.sizes
    return f"vocabularies {source:,} (source) and {target:,} (target)"


def _checksum_of(opened: Sequence[PreparedData]) -> str:
    splits = [split for prepared in opened for split in (prepared.train, prepared.valid)]
    files = [file for split in splits for s in split.index.shards for file in (s.checksum, s.lengths_checksum)]
    return hashlib.sha256("".join(files).encode()).hexdigest()


def _reading(loader: StepLoader) -> str:
    """What is read more than once, and how to mend that; nothing if every byte has one reader."""
    if loader.times_read == 1:
        return ""
    return (
        f"; each part of the shards is read by {loader.times_read:.3g} ranks on average, which changes no result and "
        f"matters only where storage is slow (a new run with data.lanes={loader.lanes_read_once} reads it once)"
    )
