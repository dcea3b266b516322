"""Mixtures: from which corpus each micro-batch of a step comes, by weights or temperature.

A share is one of micro-batches and, since nearly all of them are full, of tokens. Nothing is drawn at random: the M
micro-batches of a step are M points spread evenly over [0, 1), which the corpora divide by their shares, so that every
step holds each corpus within one micro-batch of its share. From step to step the points move by the golden ratio, whose
multiples stay spread evenly however many there are, so that realised shares converge in every lane too. The points are
a pure function of the number of the step: no ranks, no workers, nothing to remember.
"""

from collections.abc import Sequence

import numpy as np

from data_pipeline.api import DataConfig
from data_pipeline.plan import MIXTURE_START, generator

_GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio's fraction, in units of 2^-64."""
_ONE = 1 << 64
_FINENESS = 1 << 32
"""Shares are whole multiples of one part in so many, so that no rounding of another machine moves a draw."""


def mixture_faults(data: DataConfig) -> list[str]:
    """Faults of data.corpora that span several of its entries."""
    names = [corpus.name for corpus in data.corpora]
    weights = [corpus.weight for corpus in data.corpora if corpus.weight is not None]
    faults = []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"data.corpora: expected a name of its own for each corpus, found {', '.join(twice)} twice")
    if weights and len(weights) < len(names):
        faults.append(f"data.corpora: expected a weight for all corpora or for none, found {len(weights)}")
    if data.temperature != 1.0 and (weights or not names):
        instead = "weights" if weights else "no data.corpora"
        faults.append(f"data.temperature: expected data.corpora without weights, found {instead}: leave it at 1")
    if names and not any(corpus.valid for corpus in data.corpora):
        faults.append("data.corpora: expected one corpus at least to validate on, found valid: false on all")
    return faults


def shares_of(weights: Sequence[float | None], tokens: Sequence[int], temperature: float) -> list[float]:
    """The share of each corpus, in sum 1: by weights if they are given, else by tokens^(1 / temperature).

    temperature 1 takes all corpora at the same pace, a high one takes equally much of each.
    """
    if any(weight is not None for weight in weights):
        sizes = [float(weight or 0.0) for weight in weights]
    else:
        most = max(tokens)
        sizes = [(count / most) ** (1.0 / temperature) for count in tokens]
    total = sum(sizes)
    return [size / total for size in sizes]


class Draw:
    """The corpora of every step: a pure function of (shares, M, L, seed, step)."""

    def __init__(self, shares: Sequence[float], micro_batches: int, lanes: int, seed: int) -> None:
        """shares: of each corpus, in sum 1; a step has M micro-batches, number i from lane i mod L."""
        ends = np.round(np.cumsum(np.array(shares, dtype=np.float64))[:-1] * _FINENESS)
        # In units of 2^-64: corpus c takes [ends[c - 1], ends[c]).
        self._ends = np.minimum(ends, _FINENESS - 1).astype(np.uint64) * np.uint64(_ONE // _FINENESS)
        self._start = int(generator(seed, MIXTURE_START).integers(0, _ONE, dtype=np.uint64))
        indices = np.arange(micro_batches)
        rounds = micro_batches // lanes
        # Lane l's micro-batches of a step lie one in each of M / L equal strata, all at the same place in theirs.
        self._strata = (indices // lanes).astype(np.uint64) * np.uint64(_ONE // rounds % _ONE)
        self._places = np.array([lane * _ONE // lanes for lane in range(lanes)], dtype=np.uint64)[indices % lanes]
        self._rounds = np.uint64(rounds)

    def corpora(self, step: int) -> list[int]:
        """[M]: the corpus of each micro-batch of step `step` (from 0)."""
        turn = np.uint64((self._start + step * _GOLDEN) % _ONE)
        points = self._strata + (self._places + turn) // self._rounds  # sums wrap: whole turns do not matter
        found: list[int] = np.searchsorted(self._ends, points, side="right").tolist()
        return found
