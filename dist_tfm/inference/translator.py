"""Lines of text to their translations: normalises and encodes as in training, batches by length, searches, decodes.

Lines come back in their order and number, whatever their content: a blank line's translation is empty, a line that is
too long is cut with a warning, characters that the tokenizer never saw are spelt by their bytes.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from data_pipeline.api import EOS, PAD
from data_pipeline.tokenizer import Tokenizer
from dist_tfm.config.schema import DecodeConfig
from dist_tfm.inference.beam_search import SearchOptions, SearchResult, beam_search
from dist_tfm.inference.loading import load_models
from dist_tfm.inference.penalties import length_penalty
from dist_tfm.inference.ranking import FP32_TOLERANCE, ExactRanking, FastRanking, Ranking
from dist_tfm.inference.scorer import ModelScorer
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.collectives import Group, SingleProcess, together

__all__ = ["Translation", "Translator", "load_models", "plan_batches"]


@dataclass(frozen=True)
class Translation:
    """One translation of a line. score: log-probability (natural, EOS included) after the length penalty; tokens: of
    the output, EOS included (0 for a blank line, which is not decoded)."""

    text: str
    score: float
    log_prob: float
    tokens: int


def plan_batches(lengths: Sequence[int], batch_tokens: int, batch_sentences: int = 0) -> list[list[int]]:
    """Sentences of these lengths cut into batches of similar ones, the longest first.

    A batch has at most batch_tokens cells (sentences times longest), unless it is one sentence alone, and at most
    batch_sentences sentences if that is not 0. Every position from 0 to len(lengths) - 1 occurs once.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        batch = batches[-1] if batches else []
        full = (len(batch) + 1) * lengths[batch[0]] > batch_tokens if batch else True
        if full or len(batch) == batch_sentences:
            batches.append([position])
        else:
            batch.append(position)
    return batches


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Ids without special ones to source [B, S]: EOS at the end of each, then PAD."""
    padded = np.full((len(sources), 1 + max(len(ids) for ids in sources)), PAD, dtype=np.int64)
    for row, ids in enumerate(sources):
        padded[row, : len(ids)] = ids
        padded[row, len(ids)] = EOS
    return torch.from_numpy(padded).to(device)


class Translator:
    """Translates with one model or an ensemble, on one rank or on all ranks of a group together.

    In fp32 (with decode.exact) a line's translations depend on the models and the line alone, not on batches, order,
    threads or ranks: a sentence with a decision that rounding could turn is searched again in float64.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        decode: DecodeConfig,
        group: Group | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """models: in evaluation mode, on one device, all with this tokenizer. warn: takes a sentence; rank 0 only."""
        self._models, self._tokenizer, self._decode = models, tokenizer, decode
        self._group: Group = SingleProcess() if group is None else group
        self._warn = warn
        weight = models[0].embedding.weight
        self._device = weight.device
        self._options = SearchOptions(
            beam=decode.beam,
            penalty=length_penalty(decode.length_penalty, decode.alpha),
            n_best=decode.n_best,
            min_length=decode.min_length,
        )
        careful = decode.exact and weight.dtype == torch.float32
        self._ranking = FastRanking(FP32_TOLERANCE if careful else 0.0)
        self._exact_models: list[Transformer] = []
        ends = [model.position_limit for model in models if model.position_limit is not None]
        self._last_position = min(ends, default=sys.maxsize) - 1  # of a source its EOS takes one, of an output its BOS

    def translate(
        self, lines: Sequence[str], first: int = 0, advance: Callable[[int], None] = lambda _: None
    ) -> list[list[Translation]]:
        """For each line, in order, its decode.n_best translations, best first (a blank line has one, the empty text).

        Collective: every rank gives the same lines and gets all results. first: number of lines before these, for
        warnings. advance: told the number of lines done, as this rank does them. Raises DistTfmError.
        """
        sources = self._encode(lines, first)
        wanted = [position for position, ids in enumerate(sources) if ids]
        lengths = [len(sources[position]) + 1 for position in wanted]
        batches = plan_batches(lengths, self._decode.batch_tokens, self._decode.batch_sentences)

        def work() -> dict[str, list[Translation]]:
            done: dict[str, list[Translation]] = {}
            # Neighbours in the plan cost alike, so every rank gets a like share.
            for batch in batches[self._group.rank :: self._group.size]:
                positions = [wanted[i] for i in batch]
                found = self._search([sources[position] for position in positions])
                done |= {str(p): self._texts(result) for p, result in zip(positions, found, strict=True)}
                advance(len(batch))
            return done

        mine = together(self._group, "translating", work)
        if self._group.size > 1:
            mine = self._exchange(mine)
        blank = [Translation("", 0.0, 0.0, 0)]
        return [mine.get(str(position), blank) for position in range(len(lines))]

    def _encode(self, lines: Sequence[str], first: int) -> list[list[int]]:
        """Ids of each line, cut to decode.max_source."""
        bound, why = self._decode.max_source, "decode.max_source"
        if self._last_position < bound:
            bound, why = self._last_position, "model.max_positions"
        sources = self._tokenizer.encode(lines)
        for number, ids in enumerate(sources, first + 1):
            if len(ids) > bound and self._group.rank == 0:
                self._warn(f"line {number} has {len(ids):,} tokens: only the first {bound:,} are translated ({why})")
        return [ids[:bound] for ids in sources]

    def _search(self, sources: Sequence[Sequence[int]]) -> list[SearchResult]:
        """One batch; sentences with close decisions are searched again, exactly."""
        found = self._search_with(self._models, sources, self._ranking)
        close = [i for i, result in enumerate(found) if result.close]
        if close:
            if not self._exact_models:
                self._exact_models = [copy.deepcopy(model).double() for model in self._models]
            again = self._search_with(self._exact_models, [sources[i] for i in close], ExactRanking())
            for i, result in zip(close, again, strict=True):
                found[i] = result
        return found

    def _search_with(
        self, models: Sequence[Transformer], sources: Sequence[Sequence[int]], ranking: Ranking
    ) -> list[SearchResult]:
        limits = [min(len(ids) + self._decode.max_extra, self._last_position) for ids in sources]
        scorer = ModelScorer(models, pad_sources(sources, self._device))
        return beam_search(scorer, limits, self._options, ranking)

    def _texts(self, result: SearchResult) -> list[Translation]:
        return [
            Translation(self._tokenizer.decode(h.tokens), h.score, h.log_prob, len(h.tokens) + 1)
            for h in result.hypotheses
        ]

    def _exchange(self, mine: dict[str, list[Translation]]) -> dict[str, list[Translation]]:
        """Everybody's results on every rank."""
        record = {position: [asdict(t) for t in found] for position, found in mine.items()}
        merged: dict[str, list[Translation]] = {}
        for part in self._group.gather(cast(Any, record)):
            for position, found in cast(dict[str, list[dict[str, Any]]], part).items():
                merged[position] = [Translation(**t) for t in found]
        return merged
