"""Forced decoding: how probable a model finds given translations.

Shapes: B sentences, S source length, T target length, V vocabulary. Tokens count EOS, never pads.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.model.transformer import Transformer


@dataclass(frozen=True)
class ForcedScore:
    """log_probability: natural logarithm of p(target, EOS | source); tokens: how many factors it has, EOS included."""

    log_probability: float
    tokens: int

    @property
    def nll(self) -> float:
        """Negative log-probability per token: nats, without label smoothing."""
        return -self.log_probability / self.tokens


@torch.no_grad()
def forced_scores(
    models: Sequence[Transformer],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    device: torch.device,
    batch_tokens: int = 2048,
) -> list[ForcedScore]:
    """The score of each target given its source (ids without special ones), in the order given.

    Several models are an ensemble: their probabilities of each token are averaged. Sentences of like length are scored
    together, at most batch_tokens padded cells a side (one sentence if it is longer). Sums are taken in double
    precision. Models must be in evaluation mode: raises ValueError otherwise, and for sides of different length.
    """
    if any(model.training for model in models) or not models:
        raise ValueError("expected models in evaluation mode")
    if len(sources) != len(targets):
        raise ValueError(f"expected as many sources as targets, found {len(sources)} and {len(targets)}")
    scores: dict[int, ForcedScore] = {}
    for rows in _batches([(len(s) + 1, len(t) + 1) for s, t in zip(sources, targets, strict=True)], batch_tokens):
        source = _padded([[*sources[row], EOS] for row in rows], device)
        target_in = _padded([[BOS, *targets[row]] for row in rows], device)
        labels = _padded([[*targets[row], EOS] for row in rows], device)
        real = labels != PAD
        log_p = torch.stack([_log_probabilities(model, source, target_in, labels) for model in models])
        log_p = log_p.double().logsumexp(0) - math.log(len(models))
        sums = log_p.masked_fill(~real, 0.0).sum(1)
        for row, total, tokens in zip(rows, sums.tolist(), real.sum(1).tolist(), strict=True):
            scores[row] = ForcedScore(total, tokens)
    return [scores[row] for row in range(len(sources))]


def _log_probabilities(model: Transformer, source: Tensor, target_in: Tensor, labels: Tensor) -> Tensor:
    """source [B, S], target_in and labels [B, T]: log p of each label, fp32 [B, T]; at pads it means nothing."""
    logits = model.logits(model(source, target_in)).float()
    chosen: Tensor = logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return chosen


def _batches(lengths: Sequence[tuple[int, int]], batch_tokens: int) -> Iterator[list[int]]:
    """Rows of like (source, target) length, so many that no side has more than batch_tokens padded cells."""
    rows: list[int] = []
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (max(lengths[row]), lengths[row], row)):
        widest = max(widest, *lengths[row])
        if rows and (len(rows) + 1) * widest > batch_tokens:
            yield rows
            rows, widest = [], max(lengths[row])
        rows.append(row)
    if rows:
        yield rows


def _padded(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(map(len, ids))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in ids], dtype=torch.int64, device=device)
