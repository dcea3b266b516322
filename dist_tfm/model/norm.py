"""Layer normalisation and the two ways of putting it around a sublayer.

Both are functions of (x, sublayer, norm, dropout), x [B, T, D], so that a layer is composed with one of them.
"""

from collections.abc import Callable
from typing import Literal, cast

from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig

Sublayer = Callable[[Tensor], Tensor]
Connect = Callable[[Tensor, Sublayer, nn.LayerNorm, nn.Dropout], Tensor]


def connect_post_norm(x: Tensor, sublayer: Sublayer, norm: nn.LayerNorm, dropout: nn.Dropout) -> Tensor:
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's (sections 3.1 and 5.4). Unstable when deep."""
    return cast(Tensor, norm(x + dropout(sublayer(x))))


def connect_pre_norm(x: Tensor, sublayer: Sublayer, norm: nn.LayerNorm, dropout: nn.Dropout) -> Tensor:
    """x + Dropout(Sublayer(LayerNorm(x))): Tensor2Tensor's later default. The stack needs a norm at its end."""
    return x + cast(Tensor, dropout(sublayer(norm(x))))


def connection(kind: Literal["post", "pre"]) -> Connect:
    """The connection that the configuration names (model.norm)."""
    return connect_post_norm if kind == "post" else connect_pre_norm


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Normalises the last dimension, D; its statistics are taken in fp32 whatever the dtype of x."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)


def final_norm(config: ModelConfig) -> nn.LayerNorm | None:
    """What ends a stack: nothing after post-norm layers, whose output is normalised already."""
    return layer_norm(config) if config.norm == "pre" else None
