"""Position-wise feed-forward network (Vaswani et al. 2017, section 3.3) and its gated relatives."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """act(x W1 + b1) W2 + b2 (equation 2, where act is ReLU), with biases and, as in the paper, without dropout inside.

    Parameters: up.weight [d_ff, D], up.bias, down.weight [D, d_ff], down.bias.
    """

    def __init__(self, config: ModelConfig, activation: Activation = F.relu) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return cast(Tensor, self.down(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """(act(x G) * (x U)) W, without biases (Shazeer 2020, "GLU Variants Improve Transformer", equation 6).

    Parameters: gate.weight and up.weight [d_ff, D], down.weight [D, d_ff]: at the same d_ff half as many again as
    `FeedForward` has, so that the paper compares it at 2/3 of d_ff.
    """

    def __init__(self, config: ModelConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return cast(Tensor, self.down(self.activation(self.gate(x)) * self.up(x)))


def feed_forward(config: ModelConfig) -> FeedForward | GatedFeedForward:
    """What the configuration names (model.activation).

    GELU is the exact one, x Phi(x); geglu_tanh has its approximation through tanh, with which T5 1.1 was trained. SiLU,
    x sigmoid(x), is also called Swish.
    """
    activations: dict[str, Activation] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": partial(F.gelu, approximate="tanh"),
    }
    layer = GatedFeedForward if config.gated else FeedForward
    return layer(config, activations[config.activation])
