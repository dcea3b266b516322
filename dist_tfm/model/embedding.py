"""Token embeddings and the projection onto the vocabulary (Vaswani et al. 2017, section 3.4).

Shapes: B batch, T positions, D d_model, V vocabulary.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.dropout import Dropout
from dist_tfm.model.packed import Lengths
from dist_tfm.model.positions import input_positions


class OutputBias(nn.Module):
    """What is added to the score of each token, whatever came before (model.output_bias). Parameter: bias [V]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocab_size))


class Embedding(nn.Module):
    """A matrix for the tokens of one or both sides and, unless embeddings are untied, for the pre-softmax projection.

    Parameter: weight [V, D], and with learned positions positions.weight.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, config.d_model))
        nn.init.normal_(self.weight, std=config.d_model**-0.5)
        self.scale = math.sqrt(config.d_model)
        self.positions = input_positions(config)
        self.dropout = Dropout(config.input_dropout)

    def forward(self, ids: Tensor, first: int | Lengths = 0) -> Tensor:
        """ids [B, T] at positions first, first + 1, ... to Dropout(weight[ids] * sqrt(D) + PE), [B, T, D]."""
        tokens = self.look_up(ids) * self.scale
        return cast(Tensor, self.dropout(self.positions.add(tokens, first)))

    def look_up(self, ids: Tensor) -> Tensor:
        """ids [B, T] to rows of the matrix, [B, T, D]."""
        return F.embedding(ids, self.weight)
