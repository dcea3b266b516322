"""Hugging Face's MarianMTModel (Marian, Junczys-Dowmunt et al. 2018): the paper's model with biases, ours and theirs.

Shapes: D d_model, V vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import InputError
from dist_tfm.interop.translation import (
    Imported,
    Settings,
    Weights,
    attention_names,
    embedding_weights,
    is_in_stack,
    refuse_unless,
    split_name,
    take_layers,
    token_order,
)
from dist_tfm.model.positions import concatenated_sinusoids
from dist_tfm.model.transformer import Transformer

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **{"vocab_size": 58101, "d_model": 1024, "scale_embedding": False, "activation_function": "gelu"},
        **{f"{side}_layers": 12 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 16 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")},
        **{"dropout": 0.1, "attention_dropout": 0.0, "pad_token_id": 58100, "eos_token_id": 0},
        "decoder_start_token_id": 58100,
    }
)
"""Of MarianConfig, which are not written to config.json."""

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
PARTS = {
    **attention_names("self_attention", "self_attn", _PROJECTIONS),
    "self_attention_norm": "self_attn_layer_norm",
    **attention_names("cross_attention", "encoder_attn", _PROJECTIONS),
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
"""Our modules in a layer, and theirs."""


def marian_name(name: str) -> str:
    """Their name of a parameter of our encoder or decoder."""
    side, number, part, kind = split_name(name)
    return f"model.{side}.layers.{number}.{PARTS[part]}.{kind}"


def from_marian(values: Mapping[str, Any], tensors: Mapping[str, Tensor], unknown: int | None, origin: str) -> Imported:
    """A Marian model in our terms.

    values: config.json; tensors: model.safetensors; unknown: the id of the unknown token in vocab.json, None if that is
    not at hand; origin: what to call the model in errors. Raises InputError for what has no equal here.
    """
    settings, weights = Settings(values, DEFAULTS, origin), Weights(tensors, origin)
    settings.refuse("normalize_before", "normalize_embedding", "add_final_layer_norm")
    width = settings.get("d_model", int)
    source, target, output = weights.take_shared(
        "model.shared.weight",
        *(f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")),
        "lm_head.weight",
    )
    if not source.shape == target.shape == output.shape == (len(output), width):
        raise InputError(
            f"{origin}: expected one vocabulary of vectors of {width}, found {[*source.shape, *output.shape]}"
        )
    bias = weights.take_first("final_logits_bias")
    pad, start, end = (settings.get(f"{name}_token_id", int) for name in ("pad", "decoder_start", "eos"))
    order = token_order(len(output), pad, start, end, unknown)
    if not settings.get("scale_embedding", bool):
        source, target = source * width**-0.5, target * width**-0.5
    keys, embeddings = embedding_weights((source, target), output, None if bias is None else bias.flatten(), order)
    config = ModelConfig(
        encoder_layers=settings.get("encoder_layers", int),
        decoder_layers=settings.get("decoder_layers", int),
        d_model=width,
        d_ff=settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
        heads=settings.same("encoder_attention_heads", "decoder_attention_heads"),
        dropout=settings.get("dropout", float),
        attention_dropout=settings.get("attention_dropout", float),
        activation=settings.choose("activation_function", ACTIVATIONS),  # type: ignore[arg-type]
        positions="sinusoidal_concatenated",
        attention_bias=True,
        layer_norm_eps=1e-5,
        **keys,
    )
    _check_positions(weights, width, origin)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config, len(order)).named_parameters()}
    layers = take_layers(shapes, weights, marian_name)
    weights.finish()
    return Imported(config, {**embeddings, **layers}, order)


def _check_positions(weights: Weights, width: int, origin: str) -> None:
    """Their tables of positions, if they were stored, are the sinusoids. Raises InputError."""
    for side in ("encoder", "decoder"):
        table = weights.take_first(f"model.{side}.embed_positions.weight")
        if table is not None and not torch.allclose(table, concatenated_sinusoids(len(table), width), atol=1e-3):
            raise InputError(f"{origin}: expected sinusoidal positions, found others in the {side}")


def marian_settings(model: Transformer) -> dict[str, Any]:
    """Arguments of MarianConfig for our model, with our token ids. Raises ValueError for what Marian cannot express."""
    config = model.config
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    widths = (config.heads * config.key_width, config.heads * config.value_width)
    refuse_unless(
        "Marian",
        (
            ("model.norm=post without a final norm", config.norm == "post" and not config.ends_with_norm),
            ("model.normalization=layer", config.normalization == "layer"),
            ("model.layer_norm_eps=1e-5", config.layer_norm_eps == 1e-5),
            ("model.positions=sinusoidal_concatenated", config.positions == "sinusoidal_concatenated"),
            ("an activation without a gate", config.activation in names),
            ("model.tied=all or decoder", config.tied in ("all", "decoder")),
            ("heads that divide d_model and share nothing", widths == (config.d_model, config.d_model)),
            ("as many heads of keys as of queries", config.key_value_heads == config.heads),
            ("one size of both vocabularies", model.source_vocab_size == model.vocab_size),
        ),
    )
    return {
        "vocab_size": model.vocab_size,
        "decoder_vocab_size": model.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": names[config.activation],
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": config.tied == "all",
        "dropout": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }


def marian_weights(model: Transformer) -> dict[str, Tensor]:
    """Our parameters by their names, with zeros for the biases that ours may lack."""
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = {marian_name(name): value for name, value in weights.items() if is_in_stack(name)}
    for name in [name for name in found if name.endswith("_proj.weight")]:
        found.setdefault(f"{name.removesuffix('weight')}bias", torch.zeros(len(found[name])))
    if (bias := weights.get("score_bias.bias")) is not None:
        found["final_logits_bias"] = bias[None]
    if (source := weights.get("source_embedding.weight")) is None:
        return {"model.shared.weight": weights["embedding.weight"], **found}
    return {
        "model.encoder.embed_tokens.weight": source,
        "model.decoder.embed_tokens.weight": weights["embedding.weight"],
        **found,
    }
