"""Checkpoints of models that nobody trained: fast to make, and with much to say."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline.api import TokenizerConfig
from data_pipeline.clean import normalise
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from dist_tfm.checkpoint.manager import CheckpointManager
from dist_tfm.config.loading import config_to_yaml
from dist_tfm.config.schema import Config
from dist_tfm.engine.base import STATE_KINDS, Fragment
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.collectives import SingleProcess
from dist_tfm.parallel.tags import Tag
from tests.jobs import head


def small_tokenizer(lines: int = 300) -> Tokenizer:
    """420 pieces, of the first lines of the embedded corpus."""
    texts = [normalise(line) for line in head("train.en.xz", lines).splitlines()]
    return Tokenizer(train_tokenizer(texts, TokenizerConfig(vocab_size=420)), "test")


def talkative_model(config: Config, tokenizer: Tokenizer, seed: int = 1, sharpness: float = 3.0) -> Transformer:
    """A model with initial weights whose scores are sharp enough for different lines to have different outputs."""
    model = Transformer(config.model, *tokenizer.sizes)
    initialize(model, seed)
    with torch.no_grad():
        model.embedding.weight.mul_(sharpness)
    return model.eval()


@dataclass
class ModelState:
    """A model as the part of `Engine` that checkpoints use."""

    model: Transformer
    updates: int = 0

    def fragments(self, divide: bool) -> list[Fragment]:
        return [
            Fragment(
                Tag(name, tuple(p.shape), 0, 0, p.size(0), True),
                0,
                p.numel(),
                {kind: p.detach().flatten() for kind in STATE_KINDS},
            )
            for name, p in self.model.named_parameters()
        ]


def save_model(run: Path, step: int, model: Transformer, tokenizer: Tokenizer, config: Config) -> Path:
    """Writes `model` as the checkpoint of `step` of the run directory `run`."""
    run.mkdir(parents=True, exist_ok=True)
    file = run.parent / f"{run.name}.tokenizer"
    file.write_bytes(tokenizer.model)
    manager = CheckpointManager(run, SingleProcess(), keep=10, warn=print)
    return manager.save(ModelState(model), step, {}, config_to_yaml(config), file)  # type: ignore[arg-type]
