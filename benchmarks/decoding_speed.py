"""One model, one set of sentences: how long our search takes for them, and a peer's.

Shapes: B sentences, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.peers import Peer
from data_pipeline.api import EOS, UNK
from data_pipeline.plan import Lengths
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import RunError
from dist_tfm.inference.beam_search import SearchOptions, SearchResult, beam_search
from dist_tfm.inference.loading import DTYPES
from dist_tfm.inference.packing import packed_where_possible
from dist_tfm.inference.penalties import length_penalty
from dist_tfm.inference.ranking import FP32_TOLERANCE, FastRanking
from dist_tfm.inference.scorer import ModelScorer
from dist_tfm.inference.translator import pad_sources
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer

SEED = 1
SHARPNESS = 3.0
"""Factor on the embeddings: random weights as they are find all words alike, and rounding would choose among them."""

HEADLINE = (4, 32)
"""Beam and batch of the rows that carry no setting in their names."""


@dataclasses.dataclass(frozen=True)
class Sentence:
    """source: ids without EOS; length: tokens that its translation must have, EOS not counted."""

    source: list[int]
    length: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way of decoding, and the batches that are decoded."""

    beam: int
    batch: int
    batches: list[list[Sentence]]

    @property
    def name(self) -> str:
        """Such as beam-4-batch-32."""
        return f"{'greedy' if self.beam == 1 else f'beam-{self.beam}'}-batch-{self.batch}"

    @property
    def tokens(self) -> int:
        """Output tokens, EOS counted."""
        return sum(sentence.length + 1 for batch in self.batches for sentence in batch)

    def row(self, name: str) -> str:
        """The name of a row of this setting."""
        if (self.beam, self.batch) == HEADLINE:
            return name.replace("ours", "dist_tfm")
        return f"{self.name}-{name}"


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured. sentences: in batches; singly: of these, one at a time."""

    model: ModelConfig
    vocabulary: int
    sentences: int
    singly: int
    rounds: int

    def setting(self, lengths: Lengths, beam: int, batch: int) -> Setting:
        """lengths [N, 2] of a corpus's pairs, without EOS. Sentences spread evenly over the corpus, in batches of like
        length, as translate.py makes them."""
        rng = np.random.default_rng(SEED)
        wanted = min(len(lengths), self.singly if batch == 1 else self.sentences)
        chosen = lengths[np.linspace(0, len(lengths) - 1, wanted).astype(np.int64)].astype(np.int64)
        ordered = chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))].tolist()
        drawn = [
            Sentence(rng.integers(UNK + 1, self.vocabulary, source).tolist(), target) for source, target in ordered
        ]
        return Setting(beam, batch, [drawn[first : first + batch] for first in range(0, len(drawn), batch)])


def _marian_like(**sizes: int) -> ModelConfig:
    return ModelConfig(positions="sinusoidal_concatenated", layer_norm_eps=1e-5, **sizes)  # type: ignore[arg-type]


FULL = Effort(_marian_like(), 32_000, sentences=96, singly=12, rounds=3)
QUICK = Effort(_marian_like(encoder_layers=1, decoder_layers=1, d_model=64, d_ff=64, heads=4), 800, 8, 2, rounds=1)


class Ours:
    """Our translator: the model in each dtype as translate.py would hold it."""

    def __init__(self, effort: Effort, dtypes: Sequence[str]) -> None:
        self.original = random_model(effort.model, effort.vocabulary)
        self._models = {dtype: self._prepared(DTYPES[dtype]) for dtype in dtypes}

    def _prepared(self, dtype: torch.dtype) -> list[Transformer]:
        copied = Transformer(self.original.config, self.original.vocab_size, self.original.source_vocab_size)
        copied.load_state_dict(self.original.state_dict())
        return packed_where_possible([copied.to(dtype).eval().requires_grad_(False)])

    def seconds(self, dtype: str, setting: Setting) -> float:
        """Time of decoding all batches. Nothing is searched twice (decode.exact=false): the peer makes no such
        promise. Raises RunError for outputs of other lengths than were asked for."""
        started = time.perf_counter()
        results = self._search(dtype, setting, 0.0)
        seconds = time.perf_counter() - started
        check_lengths("dist_tfm", [result.hypotheses[0].tokens for result in results], setting)
        return seconds

    def search(self, setting: Setting) -> list[SearchResult]:
        """The results in fp32, each with whether rounding could have made it another."""
        return self._search("fp32", setting, FP32_TOLERANCE)

    def _search(self, dtype: str, setting: Setting, tolerance: float) -> list[SearchResult]:
        found: list[SearchResult] = []
        for batch in setting.batches:
            limits = [sentence.length for sentence in batch]
            # The minimum gives way to each sentence's limit, so that each ends exactly there.
            options = SearchOptions(setting.beam, length_penalty("gnmt"), min_length=max(limits))
            source = pad_sources([sentence.source for sentence in batch], torch.device("cpu"))
            scorer = ModelScorer(self._models[dtype], source)
            found += beam_search(scorer, limits, options, FastRanking(tolerance))
        return found


def random_model(config: ModelConfig, vocabulary: int) -> Transformer:
    """A model that finds PAD, BOS, EOS and UNK improbable everywhere, whether a program forbids them or not."""
    model = Transformer(config, vocabulary)
    initialize(model, SEED)
    with torch.no_grad():
        model.embedding.weight.mul_(SHARPNESS)
        model.embedding.weight[: UNK + 1] = 0.0  # what is scored 0 is never among the best of thousands
    return model.eval().requires_grad_(False)


def ask_peer(peer: Peer, dtype: str, setting: Setting) -> tuple[float, list[list[int]]]:
    """Seconds and outputs of the peer for all batches."""
    seconds, outputs = 0.0, []
    for batch in setting.batches:
        sources = [[*sentence.source, EOS] for sentence in batch]
        request = {"do": "translate", "dtype": dtype, "beam": setting.beam, "sources": sources}
        answer = peer.ask({**request, "lengths": [sentence.length for sentence in batch]})
        seconds += answer["seconds"]
        outputs += answer["tokens"]
    return seconds, outputs


def peer_seconds(peer: Peer, dtype: str, setting: Setting) -> float:
    """Time that the peer takes for all batches. Raises RunError for outputs of other lengths than were asked for."""
    seconds, outputs = ask_peer(peer, dtype, setting)
    check_lengths("the peer", outputs, setting)
    return seconds


def check_lengths(who: str, outputs: Sequence[Sequence[int]], setting: Setting) -> None:
    """Raises RunError unless the outputs are as long as the setting says: tokens a second would compare nothing."""
    expected = [sentence.length for batch in setting.batches for sentence in batch]
    found = [len(tokens) for tokens in outputs]
    if found != expected:
        raise RunError(f"{setting.name}: {who} was to give outputs of {expected} tokens, found {found}")


def compare_outputs(ours: Sequence[SearchResult], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the sentences with the same fp32 translation on both sides.

    Raises RunError if one differs though nothing on our way to it was so close that rounding could decide, or if that
    was nowhere so.
    """
    equal = [result.hypotheses[0].tokens == list(tokens) for result, tokens in zip(ours, theirs, strict=True)]
    certain = [same for same, result in zip(equal, ours, strict=True) if not result.close]
    if not certain or not all(certain):
        raise RunError(
            f"the two sides must translate alike to be compared, but of {len(certain)} sentences without a close "
            f"decision {len(certain) - sum(certain)} differ"
        )
    return sum(equal) / len(equal)
