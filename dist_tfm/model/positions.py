"""How a model learns where a token stands: one small class a way, all with the same two questions.

`add(tokens, first)` puts positions into the embedded tokens of a stack's input; `rotate` (in `RotaryPositions`) turns
the queries and keys of self-attention, `bias` (in `RelativePositions`) is added to its scores. Positions count from 0
in each sentence; `first` is that of the first column, so that decoding with a cache, whose columns are the newest
tokens, sees what training saw. For a packed batch it is the `Lengths` of its sentences, in each of which positions
begin anew.
Shapes: B batch, H heads, T positions, D d_model, Dk width of a head's queries and keys.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.packed import Lengths

Table = Callable[[int, int, torch.device | None], Tensor]


class Positions(Protocol):
    """What is added to embedded tokens."""

    def add(self, tokens: Tensor, first: int | Lengths) -> Tensor:
        """tokens [B, T, D] at positions first, first + 1, ...: the same with what tells their positions."""
        ...


def sinusoids(length: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Rows of positions 0..length-1, fp32 [length, D], interleaved as in Vaswani et al. 2017, section 3.5:

    PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(pos / 10000^(2i / D)). Angles are computed in
    float64, because their fp32 error grows with the position.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angles = _angles(length, torch.exp(even * (-math.log(10_000.0) / d_model)))
    table = torch.empty(length, d_model, dtype=torch.float32, device=device)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : d_model // 2]
    return table


def concatenated_sinusoids(length: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """As `sinusoids`, all sines before all cosines, as Marian and (up to the spacing of its frequencies) Tensor2Tensor.

    PE(pos, i) = sin(pos / 10000^(2i / D)) for i < ceil(D / 2), then the cosines of the same angles.
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angles = _angles(length, torch.exp(even * (-math.log(10_000.0) / d_model)))
    return torch.cat([angles.sin(), angles.cos()[:, : d_model // 2]], dim=1).to(torch.float32)


def _angles(length: int, frequencies: Tensor) -> Tensor:
    """float64 [length, frequencies]: position times frequency."""
    positions = torch.arange(length, dtype=torch.float64, device=frequencies.device)
    return positions[:, None] * frequencies[None, :]


class SinusoidalPositions:
    """Hands out rows of a table, which grows on demand: no input is too long, none is cut.

    Not a module: the table is no parameter, belongs to no checkpoint, and stays fp32 when a model is cast to bf16.
    """

    def __init__(self, d_model: int, table: Table = sinusoids) -> None:
        self._d_model = d_model
        self._make = table
        self._table = torch.empty(0, d_model, device="cpu")

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """Positions first..first+count-1 as [count, D], in the dtype and on the device of `like`."""
        if self._table.size(0) < first + count or self._table.device != like.device:
            length = grown(max(self._table.size(0), first + count))
            self._table = self._make(length, self._d_model, like.device)
        return self._table[first : first + count].to(like.dtype)

    def add(self, tokens: Tensor, first: int | Lengths) -> Tensor:
        """tokens [B, T, D] plus the rows of their positions."""
        if isinstance(first, Lengths):
            return tokens + self.rows(0, first.longest, tokens)[first.positions]
        return tokens + self.rows(first, tokens.size(1), tokens)


class LearnedPositions(nn.Module):
    """A trained vector for each position (Gehring et al. 2017), Table 3 row (E) of the paper.

    Parameter: weight [max_positions, D]. Positions beyond the table have no vector: ValueError.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.max_positions, config.d_model))
        nn.init.normal_(self.weight, std=config.d_model**-0.5)

    def add(self, tokens: Tensor, first: int | Lengths) -> Tensor:
        """tokens [B, T, D] plus the vectors of their positions. Raises ValueError beyond the last one."""
        last = first.longest if isinstance(first, Lengths) else first + tokens.size(1)
        if last > self.weight.size(0):
            raise ValueError(
                f"expected at most model.max_positions={self.weight.size(0)} positions, found {last}: learned "
                "positions end there; cut the input, or train with a larger model.max_positions"
            )
        return tokens + (self.weight[first.positions] if isinstance(first, Lengths) else self.weight[first:last])


class NoPositions:
    """Adds nothing: attention knows the positions."""

    def add(self, tokens: Tensor, first: int | Lengths) -> Tensor:
        """tokens as they are."""
        return tokens


class RotaryPositions:
    """Rotary position embedding (Su et al. 2021, "RoFormer", section 3.2.2): queries and keys of self-attention are
    turned by angles that grow with their position, so that their product depends on the distance alone.

    Features 2i and 2i + 1 are one plane, turned by pos / 10000^(2i / Dk), as in the paper. Not a module, for the reason
    of `SinusoidalPositions`.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._cos = self._sin = torch.empty(0, width // 2, device="cpu")

    def rotate(self, x: Tensor, first: int | Lengths) -> Tensor:
        """x [B, H, T, Dk] at positions first, first + 1, ...: turned, in x's dtype, computed in fp32."""
        last = first.longest if isinstance(first, Lengths) else first + x.size(2)
        if self._cos.size(0) < last or self._cos.device != x.device:
            self._fill(grown(max(self._cos.size(0), last)), x.device)
        exact = torch.promote_types(x.dtype, torch.float32)
        rows = first.positions if isinstance(first, Lengths) else slice(first, last)
        cos, sin = self._cos[rows].to(exact), self._sin[rows].to(exact)
        even, odd = x[..., 0::2].to(exact), x[..., 1::2].to(exact)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def _fill(self, length: int, device: torch.device) -> None:
        even = torch.arange(0, self._width, 2, dtype=torch.float64, device=device)
        angles = _angles(length, torch.exp(even * (-math.log(10_000.0) / self._width)))
        self._cos, self._sin = angles.cos().float(), angles.sin().float()


class RelativePositions(nn.Module):
    """Numbers that are added to the scores of self-attention, one for each head and bucket of distances (Raffel et al.
    2020, "T5", section 2.1).

    The distance of a key is its position minus the query's. Of the buckets of a direction (`causal`: all of them for
    the past; else half for each direction) the first half hold one distance each, the others logarithmically more, up
    to model.relative_distance; whatever lies beyond falls into the last one, so that no length is too long.
    Each layer has a table of its own (as in UMT5; T5's layers share one), so that no layer needs another's.
    Parameter: weight [H, buckets].
    """

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.heads, config.relative_buckets))
        nn.init.normal_(self.weight, std=config.relative_buckets**-0.5)
        self._causal, self._farthest = causal, config.relative_distance

    def bias(self, first: int, queries: int, keys: int) -> Tensor:
        """[1, H, Tq, Tk]: of queries at positions first, first + 1, ... over keys at positions 0, 1, ..."""
        places = torch.arange(max(keys, first + queries), device=self.weight.device)
        buckets = self.buckets(places[None, :keys] - places[first : first + queries, None])
        return F.embedding(buckets, self.weight.t()).permute(2, 0, 1)[None]

    def buckets(self, distances: Tensor) -> Tensor:
        """The bucket of each distance (int64, any shape), in the same shape."""
        count = self.weight.size(1) if self._causal else self.weight.size(1) // 2
        away = (-distances).clamp(min=0) if self._causal else distances.abs()
        single = count // 2
        # In fp32, as T5 was trained: whole logarithms fall to the side on which its own arithmetic puts them.
        steps = torch.log(away.clamp(min=1).float() / single) / math.log(self._farthest / single) * (count - single)
        shared = (single + steps.long()).clamp(max=count - 1)
        found = torch.where(away < single, away, shared)
        return found if self._causal else found + count * (distances > 0)


def grown(length: int) -> int:
    """A power of two from 256 on, so that a growing decoder input makes a table anew seldom."""
    return max(256, 1 << (length - 1).bit_length())


def input_positions(config: ModelConfig) -> Positions:
    """What the configuration (model.positions) adds to embedded tokens."""
    if config.positions == "learned":
        return LearnedPositions(config)
    if config.positions in ("rotary", "relative"):
        return NoPositions()
    return SinusoidalPositions(
        config.d_model, sinusoids if config.positions == "sinusoidal" else concatenated_sinusoids
    )


def rotary_positions(config: ModelConfig) -> RotaryPositions | None:
    """What turns the queries and keys of self-attention: nothing, unless model.positions says rotary."""
    return RotaryPositions(config.key_width) if config.positions == "rotary" else None
