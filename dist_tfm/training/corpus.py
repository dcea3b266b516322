"""A prepared corpus as one data-parallel rank sees it: tokenizer, training steps, held-out pairs."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.api import Position
from data_pipeline.loader import BlockLoader, StepLoader
from data_pipeline.prepared import TOKENIZER_FILE, open_prepared
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.validation import ValidationBatches, read_texts
from data_pipeline.window import Part
from dist_tfm.config.schema import Config
from dist_tfm.parallel.collectives import Group
from dist_tfm.training.validation import HeldOut


@dataclass(frozen=True)
class Corpus:
    """All that training and validation read. held_out has the batches of `validation`."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    loader: StepLoader
    held_out: HeldOut
    validation: ValidationBatches
    description: str


def open_corpus(config: Config, data: Group, start: Position) -> Corpus:
    """Opens the shards of data.shards for rank data.rank of data.size; the first step is the one at `start`.

    Raises InputError.
    """
    prepared = open_prepared(Path(config.data.shards))
    train, valid, tokenizer = prepared.train.index, prepared.valid, prepared.tokenizer
    loader = BlockLoader(prepared.train, config.data, config.train.seed, data.rank, data.size, start)
    validation = ValidationBatches([Part(valid)], loader.budget, data.rank, data.size)
    sources, references = read_texts(valid.folder, valid.index)
    source_tokens, target_tokens = train.tokens
    long = ""
    if validation.longest > loader.longest:
        long = f" (the longest has {validation.longest:,} tokens, against {loader.longest:,} in training)"
    left_out = f"; {loader.left_out} longer than a micro-batch are left out" if loader.left_out else ""
    return Corpus(
        tokenizer=tokenizer,
        tokenizer_file=prepared.folder / TOKENIZER_FILE,
        loader=loader,
        held_out=HeldOut(list(validation), validation.pairs, sources, references),
        validation=validation,
        description=(
            f"data: {train.pairs:,} pairs ({source_tokens:,} + {target_tokens:,} tokens), vocabulary "
            f"{tokenizer.vocab_size:,}, held out {validation.pairs:,}{long}{left_out}{_reading(loader)}"
        ),
    )


def _reading(loader: StepLoader) -> str:
    """What is read more than once, and how to mend that; nothing if every byte has one reader."""
    if loader.times_read == 1:
        return ""
    return (
        f"; each byte is read by {loader.times_read:.3g} ranks on average (a new run with data.lanes="
        f"{loader.lanes_read_once} reads it once)"
    )
