"""Greedy decoding: at each step the likeliest token, with a K/V cache.

Shapes: B sentences, S source length, V vocabulary.
"""

import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD, UNK
from dist_tfm.inference.cache import DecoderCache
from dist_tfm.model.transformer import Transformer

NEVER_PREDICTED = (PAD, BOS, UNK)
"""No text begins again or has holes, and byte pieces spell whatever no other piece does."""


@torch.no_grad()
def greedy(model: Transformer, source: Tensor, max_extra: int = 50) -> list[list[int]]:
    """Translates source [B, S] (EOS, then PAD on the right, as in training) into token ids without BOS and EOS.

    A sentence ends at EOS, which is dropped, or after (its source tokens without EOS) + max_extra tokens (section 6.1).
    PAD, BOS and UNK are never predicted. Each sentence's result does not depend on the others but for
    rounding. The model must be in evaluation mode: raises ValueError otherwise, and for a negative max_extra.
    """
    if max_extra < 0:
        raise ValueError(f"expected max_extra of 0 or more, found {max_extra}")
    # Every source ends with EOS, which is no part of its length here.
    limits = ((source != PAD).sum(1) - 1).clamp(min=0) + max_extra
    if model.position_limit is not None:
        limits = limits.clamp(max=model.position_limit - 1)  # BOS takes one
    cache = DecoderCache(model, source)
    results: list[list[int]] = [[] for _ in range(source.size(0))]
    places = list(range(source.size(0)))  # the sentence that each row of the cache decodes
    done = limits <= 0
    tokens = torch.full((source.size(0), 1), BOS, dtype=torch.int64, device=source.device)
    for length in range(int(limits.max()) if places else 0):
        tokens = _likeliest(model, cache.step(tokens))
        done |= (tokens[:, 0] == EOS) | (length >= limits)
        for place, token, ended in zip(places, tokens[:, 0].tolist(), done.tolist(), strict=True):
            if not ended:
                results[place].append(token)
        rows = (~done).nonzero().squeeze(1)
        if rows.numel() == 0:
            break
        if 2 * rows.numel() <= len(places):  # ended sentences stay in the batch until they are half of it
            cache.select(rows)
            tokens, limits, done = tokens[rows], limits[rows], done[rows]
            places = [places[row] for row in rows.tolist()]
    return results


def _likeliest(model: Transformer, hidden: Tensor) -> Tensor:
    """hidden [B, 1, D] of the newest position to the next tokens [B, 1]."""
    logits = model.logits(hidden)
    logits[..., list(NEVER_PREDICTED)] = float("-inf")
    return logits.argmax(-1)
