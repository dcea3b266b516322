"""Normalisation and the ways of putting it around a sublayer.

These are functions of (x, sublayer, norm, dropout), x [B, T, D], so that a layer is composed with one of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig

Sublayer = Callable[[Tensor], Tensor]
Norm = nn.LayerNorm | nn.RMSNorm
Connect = Callable[[Tensor, Sublayer, Norm, nn.Dropout], Tensor]
Side = Literal["encoder", "decoder"]


def connect_post_norm(x: Tensor, sublayer: Sublayer, norm: Norm, dropout: nn.Dropout) -> Tensor:
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's (sections 3.1 and 5.4). Unstable when deep."""
    return cast(Tensor, norm(x + dropout(sublayer(x))))


def connect_pre_norm(x: Tensor, sublayer: Sublayer, norm: Norm, dropout: nn.Dropout) -> Tensor:
    """x + Dropout(Sublayer(LayerNorm(x))): Tensor2Tensor's later default. The stack needs a norm at its end."""
    return x + cast(Tensor, dropout(sublayer(norm(x))))


def connect_deep_norm(x: Tensor, sublayer: Sublayer, norm: Norm, dropout: nn.Dropout, alpha: float) -> Tensor:
    """LayerNorm(alpha x + Dropout(Sublayer(x))): post-norm made stable when deep (Wang et al. 2022, "DeepNet")."""
    return cast(Tensor, norm(alpha * x + dropout(sublayer(x))))


def connection(config: ModelConfig, side: Side) -> Connect:
    """The connection that the configuration names (model.norm), for the layers of one stack."""
    if config.norm == "deep":
        return partial(connect_deep_norm, alpha=deep_norm_factors(config, side)[0])
    return connect_post_norm if config.norm == "post" else connect_pre_norm


def deep_norm_factors(config: ModelConfig, side: Side) -> tuple[float, float]:
    """(alpha, beta) of an encoder-decoder with N and M layers (Wang et al. 2022, figure 2): alpha weighs the residual,
    beta scales the initial weights of feed-forward, value and output projections."""
    encoder, decoder = config.encoder_layers, config.decoder_layers
    if side == "encoder":
        depth: float = (encoder**4 * decoder) ** (1 / 16)
        return 0.81 * depth, 0.87 / depth
    return (3 * decoder) ** 0.25, (12 * decoder) ** -0.25


def layer_norm(config: ModelConfig) -> Norm:
    """Normalises the last dimension, D (model.normalization); its statistics are taken in fp32 whatever x's dtype.

    layer: mean 0, variance 1, weight and bias. rms: x / sqrt(mean(x^2) + eps), weight only (Zhang and Sennrich 2019).
    """
    if config.normalization == "rms":
        return nn.RMSNorm(config.d_model, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)


def final_norm(config: ModelConfig) -> Norm | None:
    """What ends a stack: nothing after post-norm layers, whose output is normalised already, unless model.final_norm
    says so (as torch.nn.Transformer has it)."""
    return layer_norm(config) if config.ends_with_norm else None
