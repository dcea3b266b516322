"""torch.nn.Transformer: the two stacks of our model in torch's own spelling, ours and theirs.

It has neither embeddings nor a projection, and a norm at the end of each stack whether the layers are pre-norm or not.
Shapes: D d_model.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.interop.translation import is_in_stack, refuse_unless, split_name
from dist_tfm.model.transformer import Transformer

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
_OWN = {"output": "out_proj"}
_FUSED = ("query", "key", "value")
"""Rows of in_proj_weight and in_proj_bias, in this order."""

_MODULES = {
    "self_attention": "self_attn",
    "cross_attention": "multihead_attn",
    "feed_forward.up": "linear1",
    "feed_forward.down": "linear2",
    "self_attention_norm": "norm1",
}
_NORMS = {
    "encoder": {"feed_forward_norm": "norm2"},
    "decoder": {"cross_attention_norm": "norm2", "feed_forward_norm": "norm3"},
}


def torch_name(name: str) -> tuple[str, int | None]:
    """(their name, which third of it, None: all of it) of a parameter of our encoder or decoder."""
    if name.startswith(("encoder.norm.", "decoder.norm.")):
        return name, None
    side, number, part, kind = split_name(name)
    place, modules = f"{side}.layers.{number}", {**_MODULES, **_NORMS[side]}
    if part in modules:
        return f"{place}.{modules[part]}.{kind}", None
    attention, _, projection = part.rpartition(".")
    if projection in _FUSED:
        return f"{place}.{modules[attention]}.in_proj_{kind}", _FUSED.index(projection)
    return f"{place}.{modules[attention]}.{_OWN[projection]}.{kind}", None


def from_torch(theirs: nn.Transformer) -> tuple[ModelConfig, dict[str, Tensor]]:
    """(section `model`, weights of both stacks by canonical name). What embeds and scores is the caller's to add.

    Raises ValueError for parts of it that have no equal here.
    """
    first = cast(nn.TransformerEncoderLayer, theirs.encoder.layers[0])
    attention, up = first.self_attn, first.linear1
    names = [name for name, function in ACTIVATIONS.items() if first.activation is function]
    refuse_unless(
        "section model",
        (
            ("an activation among " + ", ".join(ACTIVATIONS), bool(names)),
            ("biases", attention.in_proj_bias is not None),
            ("an even d_model", theirs.d_model % 2 == 0),
        ),
    )
    config = ModelConfig(
        encoder_layers=len(theirs.encoder.layers),
        decoder_layers=len(theirs.decoder.layers),
        d_model=theirs.d_model,
        d_ff=up.out_features,
        heads=attention.num_heads,
        dropout=first.dropout1.p,
        attention_dropout=float(attention.dropout),
        norm="pre" if first.norm_first else "post",
        final_norm=True,
        activation=names[0],  # type: ignore[arg-type]
        attention_bias=True,
        layer_norm_eps=first.norm1.eps,
    )
    state = theirs.state_dict()
    weights = {}
    with torch.device("meta"):
        ours = [name for name, _ in Transformer(config, 1).named_parameters() if is_in_stack(name)]
    for name in ours:
        other, third = torch_name(name)
        value = state[other].detach().float()
        weights[name] = (value if third is None else value.chunk(3)[third]).clone()
    return config, weights


def torch_settings(config: ModelConfig) -> dict[str, Any]:
    """Arguments of torch.nn.Transformer for the stacks of our model; batch_first. Raises ValueError for what it cannot
    express."""
    refuse_unless(
        "torch.nn.Transformer",
        (
            ("model.norm=post or pre", config.norm in ("post", "pre")),
            ("a final norm", config.ends_with_norm),
            ("model.normalization=layer", config.normalization == "layer"),
            ("an activation without a gate", config.activation in ACTIVATIONS),
            ("model.attention_bias=true", config.attention_bias),
            ("positions in the input", config.positions not in ("rotary", "relative")),
            ("d_k = d_v = d_model / heads", config.key_width == config.value_width == config.d_model / config.heads),
            ("as many heads of keys as of queries", config.key_value_heads == config.heads),
        ),
    )
    return {
        "d_model": config.d_model,
        "nhead": config.heads,
        "num_encoder_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "dim_feedforward": config.d_ff,
        "dropout": config.dropout,
        "activation": ACTIVATIONS[config.activation],
        "layer_norm_eps": config.layer_norm_eps,
        "norm_first": config.norm == "pre",
        "batch_first": True,
    }


def torch_weights(model: Transformer) -> dict[str, Tensor]:
    """The state of a torch.nn.Transformer with the weights of our stacks."""
    thirds: dict[str, dict[int, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if is_in_stack(name):
            other, third = torch_name(name)
            if third is None:
                found[other] = parameter.detach().clone()
            else:
                thirds.setdefault(other, {})[third] = parameter.detach()
    return {**found, **{name: torch.cat([parts[i] for i in range(3)]) for name, parts in thirds.items()}}
