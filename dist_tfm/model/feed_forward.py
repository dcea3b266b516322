"""Position-wise feed-forward network (Vaswani et al. 2017, section 3.3)."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (equation 2), with biases and, as in the paper, without dropout inside.

    Parameters: up.weight [d_ff, D], up.bias, down.weight [D, d_ff], down.bias.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return cast(Tensor, self.down(F.relu(self.up(x))))
