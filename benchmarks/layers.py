"""The layer types of Table 1 (Vaswani et al. 2017, section 4), each as a module from [B, n, d] to [B, n, d].

Shapes: B batch, n length, d width.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention import attention_kernel
from dist_tfm.model.self_attention import self_attention

HEADS, KERNEL, WINDOW = 8, 3, 64
"""Heads of attention; k, of the convolution; r, how far a query sees to each side in restricted attention."""


class SelfAttention(nn.Module):
    """Our multi-head self-attention, of any kind that section `model` names."""

    def __init__(self, width: int, **changes: Any) -> None:
        super().__init__()
        config = ModelConfig(d_model=width, heads=HEADS, window=WINDOW, **changes)
        self.attention = self_attention(config, attention_kernel(config.attention), causal=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] to [B, n, d]."""
        return cast(Tensor, self.attention(x, x, None, False))


class Recurrent(nn.Module):
    """torch.nn.LSTM, one direction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] to [B, n, d]."""
        return cast(Tensor, self.lstm(x)[0])


class Convolutional(nn.Module):
    """A convolution over KERNEL positions, all channels with all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] to [B, n, d]."""
        return cast(Tensor, self.convolution(x.transpose(1, 2))).transpose(1, 2)


class AdditiveDecoder(nn.Module):
    """A recurrent decoder that looks at all n positions in each of its n steps, by a small network (Bahdanau et al.
    2015, equations 5 and 6): what attention was before it was all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2 * width, width)
        self.of_state, self.of_memory = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Memory and inputs are both x [B, n, d]: the states of n steps, [B, n, d]."""
        keys, state, states = self.of_memory(x), x.new_zeros(x.size(0), x.size(2)), []
        for step in range(x.size(1)):
            weights = self.score(torch.tanh(keys + self.of_state(state)[:, None])).softmax(1)
            context = (weights * x).sum(1)
            state = self.cell(torch.cat((x[:, step], context), dim=1), state)
            states.append(state)
        return torch.stack(states, dim=1)


class LayerType(NamedTuple):
    """A row of Table 1, its formulas as functions of n and d, without constants.

    operations: of a layer; sequential: of these, how many wait for each other; reach: positions to each side that an
    output depends on (None: all, or all before it); path: steps from the first position to the last, through as many
    layers as that takes; pair_floats: numbers that training keeps of every pair of positions.
    """

    make: Callable[[int], nn.Module]
    operations: Callable[[int, int], float]
    sequential: Callable[[int], int]
    reach: int | None
    path: Callable[[int], int]
    pair_floats: Callable[[int], int] = lambda width: 0


def _once(length: int) -> int:
    return 1


def _one_by_one(length: int) -> int:
    return length


def _hops(reach: int) -> Callable[[int], int]:
    return lambda length: max(1, math.ceil((length - 1) / reach))


LAYERS: Mapping[str, LayerType] = MappingProxyType(
    {
        "self-attention": LayerType(SelfAttention, lambda n, d: n * n * d, _once, None, _once),
        "self-attention-scores-kept": LayerType(
            lambda d: SelfAttention(d, attention="reference"),
            lambda n, d: n * n * d,
            _once,
            None,
            _once,
            lambda d: 2 * HEADS,
        ),
        "restricted": LayerType(
            lambda d: SelfAttention(d, self_attention="window"),
            lambda n, d: min(WINDOW, n) * n * d,
            _once,
            WINDOW,
            _hops(WINDOW),
        ),
        "linear": LayerType(
            lambda d: SelfAttention(d, self_attention="linear"), lambda n, d: n * d * d / HEADS, _once, None, _once
        ),
        "recurrent": LayerType(Recurrent, lambda n, d: n * d * d, _one_by_one, None, _one_by_one),
        "convolutional": LayerType(
            Convolutional, lambda n, d: KERNEL * n * d * d, _once, KERNEL // 2, _hops(KERNEL // 2)
        ),
        "additive-decoder": LayerType(
            AdditiveDecoder, lambda n, d: n * n * d + n * d * d, _one_by_one, None, _once, lambda d: 3 * d
        ),
    }
)
"""Linear attention came after the table. Paths of convolutions are those of undilated ones, O(n / k)."""
