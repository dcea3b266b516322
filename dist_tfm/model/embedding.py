"""Token embeddings and sinusoidal positions (Vaswani et al. 2017, sections 3.4 and 3.5).

Shapes: B batch, T positions, D d_model, V vocabulary.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig


def sinusoids(length: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Rows of positions 0..length-1, fp32 [length, D], interleaved as in the paper's formula (section 3.5):

    PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / D)). (Tensor2Tensor puts all sines
    before all cosines.) Angles are computed in float64, because their fp32 error grows with the position.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = positions[:, None] * torch.exp(even * (-math.log(10_000.0) / d_model))[None, :]
    table = torch.empty(length, d_model, dtype=torch.float32, device=device)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : d_model // 2]
    return table


class SinusoidalPositions:
    """Hands out rows of the table, which grows on demand: no input is too long, none is cut.

    Not a module: the table is no parameter, belongs to no checkpoint, and stays fp32 when a model is cast to bf16.
    """

    def __init__(self, d_model: int) -> None:
        self._d_model = d_model
        self._table = torch.empty(0, d_model, device="cpu")

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """Positions first..first+count-1 as [count, D], in the dtype and on the device of `like`."""
        if self._table.size(0) < first + count or self._table.device != like.device:
            # Powers of two, so that a growing decoder input rebuilds the table seldom.
            length = max(256, self._table.size(0), 1 << (first + count - 1).bit_length())
            self._table = sinusoids(length, self._d_model, like.device)
        return self._table[first : first + count].to(like.dtype)


class Embedding(nn.Module):
    """One matrix for source tokens, target tokens and the pre-softmax projection (section 3.4).

    Parameter: weight [V, D].
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, config.d_model))
        nn.init.normal_(self.weight, std=config.d_model**-0.5)
        self.scale = math.sqrt(config.d_model)
        self.positions = SinusoidalPositions(config.d_model)
        self.dropout = nn.Dropout(config.input_dropout)

    def forward(self, ids: Tensor, first: int = 0) -> Tensor:
        """ids [B, T] at positions first, first + 1, ... to Dropout(weight[ids] * sqrt(D) + PE), [B, T, D]."""
        tokens = F.embedding(ids, self.weight) * self.scale
        return cast(Tensor, self.dropout(tokens + self.positions.rows(first, ids.size(1), tokens)))
