"""Hugging Face's T5ForConditionalGeneration (T5, T5 1.1, mT5; Raffel et al. 2020) and UMT5, ours and theirs.

T5 neither multiplies embeddings by sqrt(D) nor divides scores by sqrt(d_k), and the first T5 multiplies the decoder's
output by 1 / sqrt(D). All three are put into the weights: embedding / sqrt(D), query * sqrt(d_k), projection / sqrt(D),
which is that same embedding where T5 ties them.
Shapes: D d_model, V vocabulary, H heads.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.config.schema import ModelConfig
from dist_tfm.interop.translation import (
    Imported,
    Settings,
    Weights,
    attention_names,
    embedding_weights,
    is_in_stack,
    refuse_unless,
    split_name,
    token_order,
)
from dist_tfm.model.transformer import Transformer

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **{"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
        **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1},
        **{"layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "pad_token_id": 0, "eos_token_id": 1},
    }
)
"""Of T5Config, which are not written to config.json."""

UNKNOWN = 2
"""The id of the unknown token in every vocabulary of T5's."""

ACTIVATIONS = {
    **{"relu": "relu", "gelu": "gelu", "silu": "silu"},
    **{"gated-gelu": "geglu_tanh", "gated-gelu_new": "geglu_tanh", "gated-silu": "swiglu"},
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o", "relative": "relative_attention_bias"}


def _parts(feed_forward: int, gated: bool) -> dict[str, str]:
    """Our modules in a layer, and theirs; the feed-forward sublayer is number 1 in the encoder, 2 in the decoder."""
    dense = f"layer.{feed_forward}.DenseReluDense"
    inner = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    return {
        **attention_names("self_attention", "layer.0.SelfAttention", _PROJECTIONS),
        "self_attention_norm": "layer.0.layer_norm",
        **attention_names("cross_attention", "layer.1.EncDecAttention", _PROJECTIONS),
        "cross_attention_norm": "layer.1.layer_norm",
        **{f"feed_forward.{ours}": f"{dense}.{theirs}" for ours, theirs in inner.items()},
        "feed_forward_norm": f"layer.{feed_forward}.layer_norm",
    }


def t5_name(name: str, gated: bool) -> str:
    """Their name of a parameter of our encoder or decoder."""
    if name in ("encoder.norm.weight", "decoder.norm.weight"):
        return name.replace("norm", "final_layer_norm")
    side, number, part, kind = split_name(name)
    return f"{side}.block.{number}.{_parts(1 if side == 'encoder' else 2, gated)[part]}.{kind}"


def from_t5(values: Mapping[str, Any], tensors: Mapping[str, Tensor], origin: str) -> Imported:
    """A T5 in our terms.

    values: config.json; tensors: model.safetensors; origin: what to call the model in errors. A feed-forward layer
    without a gate has biases here, which begin as zeros; layers that share a table of relative positions get one each,
    of the same numbers. Raises InputError for what has no equal here.
    """
    values = {"num_decoder_layers": values.get("num_layers", DEFAULTS["num_layers"]), **_present(values)}
    settings, weights = Settings(values, DEFAULTS, origin), Weights(tensors, origin)
    width, pad = settings.get("d_model", int), settings.get("pad_token_id", int)
    names = (f"{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    source, target, output = weights.take_shared("shared.weight", *names, "lm_head.weight")
    scaled = bool(values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True)))
    start = values.get("decoder_start_token_id", pad)
    order = token_order(len(output), pad, start, settings.get("eos_token_id", int), UNKNOWN)
    inputs, factor = (source * width**-0.5, target * width**-0.5), width**-0.5 if scaled else 1.0
    keys, embeddings = embedding_weights(inputs, output * factor, None, order)
    config = ModelConfig(
        encoder_layers=settings.get("num_layers", int),
        decoder_layers=settings.get("num_decoder_layers", int),
        d_model=width,
        d_ff=settings.get("d_ff", int),
        heads=settings.get("num_heads", int),
        d_k=settings.get("d_kv", int),
        d_v=settings.get("d_kv", int),
        dropout=settings.get("dropout_rate", float),
        attention_dropout=settings.get("dropout_rate", float),
        norm="pre",
        normalization="rms",
        activation=settings.choose("feed_forward_proj", ACTIVATIONS),  # type: ignore[arg-type]
        positions="relative",
        relative_buckets=settings.get("relative_attention_num_buckets", int),
        relative_distance=settings.get("relative_attention_max_distance", int),
        layer_norm_eps=settings.get("layer_norm_epsilon", float),
        **keys,
    )
    layers = _take_layers(config, len(order), weights)
    weights.finish()
    return Imported(config, {**embeddings, **layers}, order)


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _take_layers(config: ModelConfig, vocab_size: int, weights: Weights) -> dict[str, Tensor]:
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in Transformer(config, vocab_size).named_parameters()}
    # Stored by early versions, and never used.
    weights.take_first("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if not is_in_stack(name):
            continue
        if name.endswith("relative.weight"):
            side, number, *_ = split_name(name)
            first = f"{side}.layers.0.self_attention.relative.weight"
            own = weights.take_first(t5_name(name, config.gated)) if number != "0" else None
            table = weights.take(t5_name(first, config.gated), shape[::-1]).t() if number == "0" else found[first]
            found[name] = (table if own is None else own.t()).contiguous()
        elif name.endswith("feed_forward.up.bias") or name.endswith("feed_forward.down.bias"):
            found[name] = torch.zeros(shape)
        else:
            factor = math.sqrt(config.key_width) if name.endswith("query.weight") else 1.0
            found[name] = weights.take(t5_name(name, config.gated), shape) * factor
    return found


def t5_settings(model: Transformer) -> dict[str, Any]:
    """Arguments of UMT5Config for our model, whose layers too have a table of positions each, or of T5Config where all
    tables of a stack are one, with our token ids. Raises ValueError for what they cannot express.

    `model_type` says which of both; the output's bias, which neither has, is left out: the scores differ by it.
    """
    config, weights = model.config, dict(model.named_parameters())
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    biases = [p for name, p in weights.items() if name.endswith(("feed_forward.up.bias", "feed_forward.down.bias"))]
    refuse_unless(
        "T5",
        (
            ("model.norm=pre with a final norm", config.norm == "pre" and config.ends_with_norm),
            ("model.normalization=rms", config.normalization == "rms"),
            ("model.positions=relative", config.positions == "relative"),
            ("an activation of T5's", config.activation in names),
            ("no biases", not config.attention_bias and not any(bool(bias.any()) for bias in biases)),
            ("model.tied=all", config.tied == "all"),
            ("d_k = d_v", config.key_width == config.value_width),
            ("as many heads of keys as of queries", config.key_value_heads == config.heads),
        ),
    )
    return {
        "model_type": "t5" if _tables_are_shared(weights) else "umt5",
        "vocab_size": model.vocab_size,
        "d_model": config.d_model,
        "d_kv": config.key_width,
        "d_ff": config.d_ff,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "num_heads": config.heads,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "layer_norm_epsilon": config.layer_norm_eps,
        "feed_forward_proj": names[config.activation],
        "dropout_rate": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }


def t5_weights(model: Transformer) -> dict[str, Tensor]:
    """Our parameters by their names, for the model that `t5_settings` describes."""
    config, weights = model.config, {name: p.detach() for name, p in model.named_parameters()}
    shared = _tables_are_shared(weights)
    found = {"shared.weight": weights["embedding.weight"] * math.sqrt(config.d_model)}
    for name, value in weights.items():
        if not is_in_stack(name) or name.endswith("bias"):
            continue
        if name.endswith("relative.weight"):
            if shared and split_name(name)[1] != "0":
                continue
            value = value.t().contiguous()
        elif name.endswith("query.weight"):
            value = value / math.sqrt(config.key_width)
        found[t5_name(name, config.gated)] = value.clone()
    return found


def _tables_are_shared(weights: Mapping[str, Tensor]) -> bool:
    tables = {name: value for name, value in weights.items() if name.endswith("relative.weight")}
    firsts = {side: tables[f"{side}.layers.0.self_attention.relative.weight"] for side in ("encoder", "decoder")}
    return all(torch.equal(value, firsts[name.partition(".")[0]]) for name, value in tables.items())
