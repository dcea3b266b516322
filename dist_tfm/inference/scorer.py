"""One or several models as a source of next-token log-probabilities, with what they remember between steps.

Shapes: B sentences, W hypotheses a sentence (the same number for each), S source length, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dist_tfm.inference.cache import DecoderCache
from dist_tfm.model.transformer import Transformer

Ids = NDArray[np.int64]


class ModelScorer:
    """The mean of the models' probabilities (one model: its own), each model with its own caches.

    All models share the vocabulary; their architectures may differ.
    """

    def __init__(self, models: Sequence[Transformer], source: Tensor) -> None:
        """Encodes source [B, S] (EOS, then PAD on the right). Raises ValueError for a model in training mode."""
        self._models = models
        self._caches = [DecoderCache(model, source) for model in models]
        self._device = source.device
        self._rows = source.size(0)  # hypotheses held: B * W

    @torch.no_grad()
    def step(self, tokens: Ids) -> Tensor:
        """tokens [B * W], the newest one of each hypothesis: log-probabilities of the next [B * W, V], fp32 or better.

        The caller may write into the result.
        """
        self._rows = len(tokens)
        ids = torch.from_numpy(tokens).to(self._device)[:, None]
        total: Tensor | None = None
        for model, cache in zip(self._models, self._caches, strict=True):
            logits = model.logits(cache.step(ids)[:, -1])
            log_probs = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
            total = log_probs if total is None else torch.logaddexp(total, log_probs)
        assert total is not None  # there is at least one model
        if len(self._models) > 1:
            # Rounding could lift a certain token above probability 1, and a sum that grows would break the bound.
            total = (total - math.log(len(self._models))).clamp_(max=0.0)
        return total

    def select(self, hypotheses: Ids, sentences: Ids) -> None:
        """Keeps the sentences [B'] named, and as their hypotheses the rows [B' * W'] named, in that order."""
        # A beam of one reorders nothing until a sentence ends: no copy then.
        moved = not np.array_equal(hypotheses, np.arange(self._rows))
        rows = torch.from_numpy(hypotheses).to(self._device)
        kept = torch.from_numpy(sentences).to(self._device)
        for cache in self._caches:
            if moved:
                cache.reorder(rows)
            if len(sentences) < cache.sentences:
                cache.keep(kept)
