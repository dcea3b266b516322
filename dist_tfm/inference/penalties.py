"""Length penalties: what a hypothesis's log-probability is divided by, and how good an unfinished one can still get.

Lengths count tokens with EOS. The score of a hypothesis is (sum of its log-probabilities) / divisor(length); without a
penalty the shortest hypotheses win, because every further token costs probability.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
PenaltyName = Literal["gnmt", "average", "none"]


@dataclass(frozen=True)
class LengthPenalty:
    """divisor: lengths (any shape, each at least 1) to positive numbers, monotonic in the length."""

    divisor: Callable[[Numbers], Numbers]

    def normalise(self, log_probs: Numbers, lengths: Numbers) -> Numbers:
        """Scores of finished hypotheses."""
        return log_probs / self.divisor(lengths)

    def bound(self, log_probs: Numbers, shortest: Numbers, longest: Numbers) -> Numbers:
        """The highest score that an unfinished hypothesis can reach if it ends with shortest to longest tokens.

        Log-probabilities only fall as tokens are added, so its own is the most that remains; divided by a monotonic
        divisor that is best at one of the two ends: at the longest for a log-probability below 0 and a divisor that
        grows, at the shortest if one of the two is the other way round.
        """
        return np.maximum(self.normalise(log_probs, shortest), self.normalise(log_probs, longest))


def length_penalty(name: PenaltyName, alpha: float = 0.6) -> LengthPenalty:
    """The penalty that the configuration names (decode.length_penalty).

    gnmt: ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14; Vaswani et al. 2017, section 6.1, with alpha 0.6).
    average: length, so that the score is the mean log-probability of a token. none: 1. Only gnmt reads alpha.
    Raises ValueError for another name.
    """
    if name == "gnmt":
        return LengthPenalty(lambda lengths: ((5.0 + lengths) / 6.0) ** alpha)
    if name == "average":
        return LengthPenalty(lambda lengths: np.asarray(lengths, dtype=np.float64))
    if name == "none":
        return LengthPenalty(lambda lengths: np.ones_like(lengths, dtype=np.float64))
    raise ValueError(f"expected a length penalty gnmt, average or none, found {name!r}")
