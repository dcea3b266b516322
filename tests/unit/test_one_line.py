"""Every member of the family is one line of a configuration away from any other, and learns."""

import dataclasses
import typing
from collections.abc import Iterator

import pytest
import torch

from data_pipeline.settings import load_sections
from dist_tfm.config.loading import SECTIONS, check_sections, make_config
from dist_tfm.config.schema import Config, ModelConfig
from dist_tfm.model.initialization import deep_norm_gain, initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.schedule import rate_function
from tests.unit.test_model_variants import VOCAB, batch

torch.set_num_threads(1)
SMALL = {
    **{"model.d_model": "16", "model.d_ff": "24", "model.heads": "2", "model.dropout": "0.0"},
    **{"model.encoder_layers": "1", "model.decoder_layers": "1", "schedule.warmup": "5", "schedule.peak": "2e-2"},
}
"""What makes configs/tiny.yaml train in a moment."""

NUMBERS = {"kv_heads": "1", "d_k": "6", "d_v": "6", "encoder_layers": "3", "decoder_layers": "2", "window": "3"}
NOT_VARIANTS = {"d_model", "d_ff", "heads", "dropout", "embedding_dropout", "attention_dropout", "layer_norm_eps"}
PARAMETERS = {"max_positions", "relative_buckets", "relative_distance"}
"""Of a variant that has another line."""
ON_A_GPU = ("attention", "flex")
"""Whose backward pass is there alone: tests/gpu trains it."""


def lines() -> Iterator[tuple[str, str]]:
    """(key, value) of every variant, from the schema itself: one that is added later is tried too."""
    hints = typing.get_type_hints(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        kind = hints[field.name]
        if typing.get_origin(kind) is typing.Literal:
            yield from ((field.name, value) for value in typing.get_args(kind))
        elif kind is bool or bool in typing.get_args(kind):
            yield from ((field.name, value) for value in ("true", "false"))
        elif field.name in NUMBERS:
            yield field.name, NUMBERS[field.name]
        else:
            assert field.name in NOT_VARIANTS | PARAMETERS, f"model.{field.name}: which line tries it?"


def configured(key: str, value: str) -> Config:
    """The small configuration with one line changed."""
    sections = load_sections("tiny", [*SMALL.items(), (f"model.{key}", value)], SECTIONS)
    check_sections(sections)
    return make_config(sections)


def changing() -> list[tuple[str, str]]:
    """The lines that say something else than the small configuration does."""
    model = load_sections("tiny", [*SMALL.items()], SECTIONS)["model"]
    return [
        (key, value) for key, value in lines() if str(getattr(model, key)).lower() != value and (key, value) != ON_A_GPU
    ]


@pytest.mark.parametrize(("key", "value"), changing(), ids="=".join)
def test_one_changed_line_trains(key: str, value: str) -> None:
    config = configured(key, value)
    model = Transformer(config.model, VOCAB)
    initialize(model, config.train.seed, deep_norm_gain(config.model))
    loss_of = TranslationLoss(model, config.train.label_smoothing)
    adam = torch.optim.AdamW(parameter_groups(model, config.optim), betas=(config.optim.beta1, config.optim.beta2))
    rate, losses = rate_function(config.schedule, config.model.d_model), []
    for update in range(1, 21):
        for group in adam.param_groups:
            group["lr"] = rate(update)
        loss, _ = loss_of(*batch())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(after == after for after in losses)


def test_the_lines_are_all_there_and_differ() -> None:
    found = dict.fromkeys(key for key, _ in changing())
    assert {"norm", "normalization", "activation", "positions", "tied", "self_attention", "kv_heads"} <= set(found)
    models = {configured(key, value).model for key, value in changing()}
    assert len(models) == len(changing()) > 25
