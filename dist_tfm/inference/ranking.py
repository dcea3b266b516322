"""How the best tokens of a hypothesis are found, and how far apart two scores must be for their order to be certain.

Shapes: R hypotheses, V vocabulary.
The same sentence in another batch is computed by other kernels, in another order of summation: its fp32 scores differ
in the last digits, and where two hypotheses are that close, their order is chance. So a search in fp32 notes such
decisions (`Ranking.tolerance`), and a sentence with one of them is searched again with `ExactRanking`, on float64
scores rounded to a grid: closer ones are ties, and the lower beam, then the lower token id wins.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

FP32_TOLERANCE = 4e-5
"""Nats a square root of a token. On a model of the base size, fp32 is off by up to 7e-6 for one token and 4e-5 for the
sum of 40 (it grows with the square root), and two hypotheses are compared: three times their common error."""

GRID = 2.0**30
"""Steps a nat: sums of log-probabilities on the grid are exact in float64, and rounding (1e-13) is far below a step."""


BLOCK = 64
"""Scores that `top_of_blocks` looks at together."""


class Ranking(Protocol):
    """What the search asks of an arithmetic."""

    def tolerance(self, tokens: float) -> float:
        """Nats by which the sums of two hypotheses of so many tokens must differ for their order to be certain."""
        ...

    def prepare(self, log_probs: Tensor) -> Tensor:
        """log_probs [R, V] as they are to be compared and summed."""
        ...

    def best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` highest of prepared log_probs [R, V], highest first, and their token ids: [R, count] each."""
        ...


def top_of_blocks(scores: Tensor, count: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """The same as `scores.topk(count)` of [R, V]: values, highest first, and positions, [R, count] each.

    The highest scores lie in the blocks whose own highest are the highest, so that one plain pass over V finds the
    blocks and few scores are left to choose among: for a vocabulary several times faster than `topk`.
    """
    rows, width = scores.shape
    blocks = width // block
    if blocks <= 2 * count:
        values, ids = scores.topk(count)
        return values, ids
    # What is left at the end and fills no block is a candidate as it is.
    whole = scores[:, : blocks * block].view(rows, blocks, block)
    chosen = whole.amax(-1).topk(count, sorted=False).indices
    candidates = whole.gather(1, chosen[:, :, None].expand(-1, -1, block)).flatten(1)
    values, places = torch.cat((candidates, scores[:, blocks * block :]), 1).topk(count)
    rest = places - count * block
    inside = places.clamp(max=count * block - 1)
    ids = chosen.gather(1, inside // block) * block + inside % block
    return values, torch.where(rest < 0, ids, blocks * block + rest)


class FastRanking:
    """Takes scores as they are; which of two equal ones comes first is left open, and is a close decision.

    rounding: what it may do to the difference of two hypotheses, in nats a square root of a token; 0: no decision
    counts as close.
    """

    def __init__(self, rounding: float) -> None:
        self._rounding = rounding

    def tolerance(self, tokens: float) -> float:
        return self._rounding * math.sqrt(tokens)

    def prepare(self, log_probs: Tensor) -> Tensor:
        return log_probs

    def best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return top_of_blocks(log_probs, count)


class ExactRanking:
    """Scores in float64 on a grid, ties in the order of token ids: no decision depends on how it was computed."""

    def tolerance(self, tokens: float) -> float:
        return 0.0

    def prepare(self, log_probs: Tensor) -> Tensor:
        return (log_probs.to(torch.float64) * GRID).round() / GRID

    def best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, ids = log_probs.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
