"""Our weights as a Marian model of Hugging Face's transformers, which is the same architecture in another spelling."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.transformer import Transformer

MARIAN = {
    "norm": "post",
    "normalization": "layer",
    "activation": "relu",
    "positions": "sinusoidal_concatenated",
    "tied": "all",
    "layer_norm_eps": 1e-5,
}
"""Keys of section `model` that a Marian model has no choice about."""

_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_PARTS = {
    "self_attention": "self_attn",
    "self_attention_norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}


def marian_settings(model: Transformer) -> dict[str, Any]:
    """Arguments of transformers' `MarianConfig`. Raises ValueError for what Marian cannot express."""
    config = model.config
    expected = ModelConfig(**{**vars(config), **MARIAN})
    widths = (config.key_value_heads, config.heads * config.key_width, config.heads * config.value_width)
    if config != expected or widths != (config.heads, config.d_model, config.d_model):
        raise ValueError(f"expected a model that Marian can express, found {config}")
    return {
        "vocab_size": model.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": "relu",
        "scale_embedding": True,
        "dropout": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }


def marian_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's parameters, with the biases that Marian has and the paper's attention has not: zeros."""
    return {name: value.detach().clone() for name, value in _renamed(model)}


def _renamed(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield "model.shared.weight", model.embedding.weight
    for side in ("encoder", "decoder"):
        for number, layer in enumerate(getattr(model, side).layers):
            place = f"model.{side}.layers.{number}"
            for name, value in layer.named_parameters():
                part, _, kind = name.rpartition(".")
                attention, _, projection = part.rpartition(".")
                if projection in _ATTENTION:
                    renamed = f"{place}.{_PARTS[attention]}.{_ATTENTION[projection]}"
                    yield f"{renamed}.bias", torch.zeros(value.size(0))
                else:
                    renamed = f"{place}.{_PARTS[part]}"
                yield f"{renamed}.{kind}", value
