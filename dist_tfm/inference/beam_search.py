"""Beam search (Vaswani et al. 2017, section 6.1: beam 4, length penalty 0.6, output up to input + 50, early stopping).

Shapes: B sentences still searched, W hypotheses of each (1 at first, then the beam K), V vocabulary.
Each step ranks all continuations of a sentence's hypotheses. Those that end, and are among the K best, are finished;
the K best of the others live on, so the beam never narrows. A sentence is done when no living hypothesis can still beat
the worst finished one that would be returned: stopping there changes no result. With a beam of 1 there is nothing to
compare with: it ends with the first EOS that is likeliest, which is greedy decoding.

Models run on their device; what is chosen among is small, and decided here in float64 with NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.api import BOS, EOS
from dist_tfm.errors import RunError
from dist_tfm.inference.greedy import NEVER_PREDICTED
from dist_tfm.inference.penalties import LengthPenalty
from dist_tfm.inference.ranking import Ranking

Ids = NDArray[np.int64]
Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Scorer(Protocol):
    """Where log-probabilities come from: models, or a table in a test."""

    def step(self, tokens: Ids) -> Tensor:
        """tokens [B * W], the newest one of each hypothesis: log-probabilities of the next one [B * W, V], all <= 0.

        The search writes into the result.
        """
        ...

    def select(self, hypotheses: Ids, sentences: Ids) -> None:
        """Keeps the sentences [B'] named, and as their hypotheses the rows [B' * W'] named, in that order."""
        ...


@dataclass(frozen=True)
class SearchOptions:
    """beam: K, hypotheses that live side by side; n_best: finished ones returned; min_length: fewest tokens before EOS
    (as far as a sentence's limit allows)."""

    beam: int
    penalty: LengthPenalty
    n_best: int = 1
    min_length: int = 0


@dataclass(frozen=True)
class Hypothesis:
    """tokens: without EOS; log_prob: natural logarithm of its probability, EOS included; score: that after the length
    penalty, by which hypotheses are ranked."""

    tokens: list[int]
    log_prob: float
    score: float


@dataclass(frozen=True)
class SearchResult:
    """hypotheses: up to n_best, best first. close: a decision on the way was within the ranking's tolerance."""

    hypotheses: list[Hypothesis]
    close: bool


class _Candidates(NamedTuple):
    """The 2K + 1 best continuations of each sentence, best first: [B, 2K + 1] each. At least K + 1 do not end.

    ended: continues with EOS. origin: which of the W hypotheses is continued. Impossible ones have -inf.
    """

    log_probs: Scores
    tokens: Ids
    origin: Ids
    ended: Flags


def beam_search(scorer: Scorer, limits: Sequence[int], options: SearchOptions, ranking: Ranking) -> list[SearchResult]:
    """Searches the sentences that `scorer` was built for; limits [B]: most tokens of each, EOS not counted.

    A hypothesis that has reached its limit must end there, at the price of EOS. PAD, BOS and UNK are never predicted.
    Raises RunError if the scores are no numbers.
    """
    search = _Search(limits, options, ranking)
    while search.open_sentences:
        candidates = search.expand(scorer.step(search.newest))
        kept, rows = search.advance(candidates)
        if len(kept):
            scorer.select(rows, kept)
    return search.results()


class _Search:
    """The state between two steps; finished hypotheses and closeness are kept by original place of the sentence."""

    def __init__(self, limits: Sequence[int], options: SearchOptions, ranking: Ranking) -> None:
        count = len(limits)
        self._options, self._ranking = options, ranking
        self._places: Ids = np.arange(count)
        self._limits: Ids = np.asarray(limits, dtype=np.int64)
        self._log_probs: Scores = np.zeros((count, 1))
        self._history: Ids = np.zeros((count, 1, 0), dtype=np.int64)
        self._finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self._close: Flags = np.zeros(count, dtype=np.bool_)
        # What scores may be off by, of whatever length: [all sentences].
        longest = self._limits.astype(np.float64) + 1.0
        tolerance = np.array([ranking.tolerance(tokens) for tokens in longest.tolist()])
        self._slack: Scores = options.penalty.bound(tolerance, np.ones_like(longest), longest)
        self.newest: Ids = np.full(count, BOS, dtype=np.int64)

    @property
    def open_sentences(self) -> int:
        """Sentences that are not done."""
        return len(self._places)

    def results(self) -> list[SearchResult]:
        """What was found, by original place."""
        n_best = self._options.n_best
        for place, found in enumerate(self._finished):
            scores = np.array([h.score for h in found])
            self._close[place] |= bool((scores[:-1] - scores[1:] < self._slack[place]).any())
        return [
            SearchResult(found[:n_best], bool(close)) for found, close in zip(self._finished, self._close, strict=True)
        ]

    def expand(self, log_probs: Tensor) -> _Candidates:
        """log_probs [B * W, V] of the next token to the best continuations."""
        sentences = self.open_sentences
        columns = 2 * self._options.beam + 1
        values, ids = self._best_tokens(log_probs, columns)
        totals = (self._log_probs[:, :, None] + values).reshape(sentences, -1)
        if np.isnan(totals).any():
            raise RunError(
                "the model's scores are not numbers: its weights are damaged or its training diverged; "
                "name another checkpoint"
            )
        # Stable: among equals the lower beam comes first, then (from an exact ranking) the lower token id.
        order = np.argsort(-totals, axis=1, kind="stable")[:, :columns]
        tokens = np.take_along_axis(ids.reshape(sentences, -1), order, 1)
        totals = np.take_along_axis(totals, order, 1)
        missing = ((0, 0), (0, columns - order.shape[1]))
        totals = np.pad(totals, missing, constant_values=-np.inf)
        tokens, origin = np.pad(tokens, missing), np.pad(order // values.shape[2], missing)
        return _Candidates(totals, tokens, origin, (tokens == EOS) & np.isfinite(totals))

    def _best_tokens(self, log_probs: Tensor, count: int) -> tuple[Scores, Ids]:
        """Each hypothesis's best tokens, best first: [B, W, count] log-probabilities and ids; fewer if V is smaller."""
        sentences, width = self._log_probs.shape
        length = self._history.shape[2]
        log_probs = self._ranking.prepare(log_probs)
        log_probs[:, list(NEVER_PREDICTED)] = -np.inf
        eos = log_probs[:, EOS].cpu().numpy().astype(np.float64).reshape(sentences, width)
        if length < self._options.min_length:
            log_probs[:, EOS] = -np.inf
        best, which = self._ranking.best(log_probs, min(count, log_probs.size(1)))
        values = best.cpu().numpy().astype(np.float64).reshape(sentences, width, -1)
        ids = which.cpu().numpy().reshape(sentences, width, -1)
        full = self._limits <= length
        if full.any():  # nothing but EOS can follow, whatever the minimum length
            values[full], ids[full, :, 0] = -np.inf, EOS
            values[full, :, 0] = eos[full]
        return values, ids

    def advance(self, candidates: _Candidates) -> tuple[Ids, Ids]:
        """Finishes, prunes, drops sentences that are done. Returns the sentences [B'] and hypotheses [B' * K] kept, as
        numbers in the present batch."""
        beam, width = self._options.beam, self._log_probs.shape[1]
        # The K + 1 best that do not end: a stable sort by "ends" alone leaves them in their order.
        living = np.argsort(candidates.ended, axis=1, kind="stable")[:, : beam + 1]
        living_log_probs = np.take_along_axis(candidates.log_probs, living, 1)
        self._close[self._places] |= self._is_close(candidates, living_log_probs)
        self._finish(candidates)
        done = self._are_done(candidates, living_log_probs[:, 0])
        kept = np.flatnonzero(~done)
        living = living[kept, :beam]
        origin = np.take_along_axis(candidates.origin[kept], living, 1)
        tokens = np.take_along_axis(candidates.tokens[kept], living, 1)
        self._history = np.concatenate((self._history[kept[:, None], origin], tokens[:, :, None]), axis=2)
        self._log_probs = living_log_probs[kept, :beam]
        self._places, self._limits = self._places[kept], self._limits[kept]
        self.newest = tokens.reshape(-1)
        return kept, (kept[:, None] * width + origin).reshape(-1)

    def _is_close(self, candidates: _Candidates, living: Scores) -> Flags:
        """[B] Whether what lives on, or what is finished, would be another if scores were off by the tolerance."""
        beam, tolerance = self._options.beam, self._ranking.tolerance(self._history.shape[2] + 1)
        log_probs, ended = candidates.log_probs, candidates.ended
        pruned = living[:, beam] > living[:, beam - 1] - tolerance
        # An ending within the K best, but hardly; or hardly not.
        inside = ended[:, :beam] & (log_probs[:, :beam] < log_probs[:, beam, None] + tolerance)
        outside = ended[:, beam:] & (log_probs[:, beam:] > log_probs[:, beam - 1, None] - tolerance)
        close: Flags = pruned | inside.any(1) | outside.any(1)
        return close if tolerance else np.zeros_like(close)

    def _finish(self, candidates: _Candidates) -> None:
        """Files the candidates that end and are among the K best."""
        options = self._options
        length = self._history.shape[2] + 1
        rows, columns = np.nonzero(candidates.ended[:, : options.beam])
        log_probs = candidates.log_probs[rows, columns]
        scores = options.penalty.normalise(log_probs, np.full(len(rows), float(length)))
        for row, column, log_prob, score in zip(rows, columns, log_probs.tolist(), scores.tolist(), strict=True):
            found = self._finished[self._places[row]]
            # One more than is returned: results that the next best nearly beat are close.
            if len(found) <= options.n_best or score > found[-1].score:
                tokens = self._history[row, candidates.origin[row, column]].tolist()
                found.append(Hypothesis(tokens, log_prob, score))
                found.sort(key=lambda hypothesis: -hypothesis.score)  # stable: equals stay in the order of finishing
                del found[options.n_best + 1 :]

    def _are_done(self, candidates: _Candidates, best_living: Scores) -> Flags:
        """[B] Whether nothing that lives can change what is returned."""
        n_best, length = self._options.n_best, self._history.shape[2]
        finished = [self._finished[place] for place in self._places]
        worst = np.array([f[n_best - 1].score if len(f) >= n_best else -np.inf for f in finished])
        if self._options.beam == 1:
            done: Flags = candidates.ended[:, 0] | (self._limits <= length)
            return done
        longest = self._limits.astype(np.float64) + 1.0
        # The living have one token more than the history, and EOS is still to come.
        bound = self._options.penalty.bound(best_living, np.minimum(length + 2.0, longest), longest)
        done = bound <= worst
        self._close[self._places] |= done & (bound > worst - self._slack[self._places])
        return done
