"""Beam search against brute force, against itself without its shortcuts, and against greedy decoding."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD, UNK
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import RunError
from dist_tfm.inference.beam_search import Hypothesis, SearchOptions, SearchResult, beam_search
from dist_tfm.inference.cache import DecoderCache
from dist_tfm.inference.greedy import greedy
from dist_tfm.inference.penalties import LengthPenalty, Numbers, length_penalty
from dist_tfm.inference.ranking import ExactRanking, FastRanking, Ranking
from dist_tfm.inference.scorer import Ids, ModelScorer
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer

torch.set_num_threads(1)
TOKENS = (4, 5, 6, 7)  # what can be predicted beside EOS
VOCAB = 8
EXACT, FAST = ExactRanking(), FastRanking(0.0)
PENALTIES = {
    "none": length_penalty("none"),
    "average": length_penalty("average"),
    "gnmt": length_penalty("gnmt", 0.6),
    "gnmt-steep": length_penalty("gnmt", 2.0),
}
EVERY_PENALTY = pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())


@dataclass
class Table:
    """A language that is a table: log-probabilities of the next token by everything before it, drawn when asked for.

    ending: how much likelier EOS is than others; sharpness: 0 makes everything alike; noise: most that each
    log-probability is off by; a second table of the same seed with noise is "the same model in another batch".
    """

    seed: int
    ending: float = 0.0
    sharpness: float = 1.5
    noise: float = 0.0
    known: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def log_probs(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.known:
            generator = np.random.default_rng([self.seed, *prefix])
            scores = generator.normal(size=VOCAB) * self.sharpness
            scores[EOS] += self.ending
            log_probs = scores - np.log(np.exp(scores).sum())
            blur = np.random.default_rng([self.seed + 1, *prefix]).choice((-1.0, 1.0), VOCAB) * self.noise
            self.known[prefix] = log_probs + blur
        return self.known[prefix]

    def total(self, tokens: Sequence[int]) -> float:
        """Log-probability of a whole output, EOS included."""
        complete = (*tokens, EOS)
        return float(sum(self.log_probs(complete[:i])[token] for i, token in enumerate(complete)))


class TableScorer:
    """Tables instead of models, one a sentence; remembers how many rows each step had."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._prefixes: list[tuple[int, ...]] = [()] * len(tables)
        self.rows: list[int] = []

    def step(self, tokens: Ids) -> Tensor:
        self.rows.append(len(tokens))
        width = len(tokens) // len(self._tables)
        self._prefixes = [
            prefix if token == BOS else (*prefix, int(token))
            for prefix, token in zip(self._prefixes, tokens, strict=True)
        ]
        tables = [table for table in self._tables for _ in range(width)]
        rows = [table.log_probs(prefix) for table, prefix in zip(tables, self._prefixes, strict=True)]
        return torch.from_numpy(np.stack(rows))

    def select(self, hypotheses: Ids, sentences: Ids) -> None:
        self._prefixes = [self._prefixes[i] for i in hypotheses]
        self._tables = [self._tables[i] for i in sentences]


def search(
    tables: Sequence[Table], limits: Sequence[int], options: SearchOptions, ranking: Ranking = EXACT
) -> list[SearchResult]:
    return beam_search(TableScorer(tables), limits, options, ranking)


def texts(results: Sequence[SearchResult]) -> list[list[list[int]]]:
    return [[h.tokens for h in result.hypotheses] for result in results]


def brute_force(table: Table, limit: int, penalty: LengthPenalty, shortest: int) -> list[Hypothesis]:
    """Every output of shortest to limit tokens, best first."""
    found = []
    for length in range(min(shortest, limit), limit + 1):
        for tokens in itertools.product(TOKENS, repeat=length):
            total = table.total(tokens)
            score = penalty.normalise(np.array([total]), np.array([length + 1.0]))
            found.append(Hypothesis(list(tokens), total, float(score[0])))
    return sorted(found, key=lambda h: -h.score)


@EVERY_PENALTY
@pytest.mark.parametrize("shortest", [0, 2, 9])
def test_a_beam_that_is_wide_enough_finds_the_best_of_all_sequences(penalty: LengthPenalty, shortest: int) -> None:
    """4 usable tokens, up to 4 of them and EOS: 341 outputs, whose best seven, their order and scores must be right."""
    wide = len(TOKENS) ** 4 * (len(TOKENS) + 1)
    for seed, limit in itertools.product(range(3), (0, 1, 4)):
        table = Table(seed, ending=0.5 * seed)
        options = SearchOptions(wide, penalty, n_best=7, min_length=shortest)
        expected = brute_force(table, limit, penalty, shortest)[:7]
        [found] = search([table], [limit], options)
        assert [h.tokens for h in found.hypotheses] == [h.tokens for h in expected]
        assert [h.score for h in found.hypotheses] == pytest.approx([h.score for h in expected], abs=1e-7)
        assert [h.log_prob for h in found.hypotheses] == pytest.approx([h.log_prob for h in expected], abs=1e-7)


class Exhaustive(LengthPenalty):
    """The same scores without a bound: nothing stops before every limit is reached."""

    def bound(self, log_probs: Numbers, shortest: Numbers, longest: Numbers) -> Numbers:
        return np.where(np.isfinite(log_probs) & (log_probs < 0), np.inf, log_probs)


@EVERY_PENALTY
def test_stopping_early_changes_nothing_and_saves_steps(penalty: LengthPenalty) -> None:
    saved = 0
    for seed, beam, ending in itertools.product(range(3), (2, 5), (-1.0, 1.5)):
        for n_best in {1, 2, beam}:
            tables = [Table(seed, ending), Table(100 + seed, ending)]
            options = SearchOptions(beam, penalty, n_best)
            early = TableScorer(tables)
            found = beam_search(early, [14, 7], options, EXACT)
            late = TableScorer(tables)
            everything = beam_search(late, [14, 7], replace(options, penalty=Exhaustive(penalty.divisor)), EXACT)
            assert found == everything
            assert len(late.rows) == 15, "limit 14, and a step for the EOS after it"
            saved += len(late.rows) - len(early.rows)
    assert saved > 40


@EVERY_PENALTY
def test_sentences_of_a_batch_do_not_touch_each_other(penalty: LengthPenalty) -> None:
    tables = [Table(seed, ending=0.7 * (seed % 4)) for seed in range(9)]
    limits = [5, 0, 9, 1, 3, 12, 7, 7, 2]
    options = SearchOptions(4, penalty, n_best=3, min_length=1)
    alone = [search([table], [limit], options)[0] for table, limit in zip(tables, limits, strict=True)]
    assert search(tables, limits, options) == alone
    assert search(tables[::-1], limits[::-1], options) == alone[::-1]


def test_finished_sentences_leave_the_batch_and_the_beam_stays_full() -> None:
    tables = [Table(seed) for seed in range(3)]
    scorer = TableScorer(tables)
    beam_search(scorer, [0, 3, 9], SearchOptions(4, Exhaustive(PENALTIES["none"].divisor)), EXACT)
    # One row a sentence at first; the sentence of limit 0 leaves at once, that of limit 3 after its fourth step.
    assert scorer.rows == [3, 8, 8, 8, 4, 4, 4, 4, 4, 4]


def test_a_beam_of_one_ends_with_the_first_eos_that_is_likeliest() -> None:
    for seed, penalty in itertools.product(range(20), PENALTIES.values()):
        table = Table(seed, ending=1.0)
        greedily: list[int] = []
        while len(greedily) < 6:
            scores = table.log_probs(tuple(greedily)).copy()
            scores[[PAD, BOS, UNK]] = -np.inf
            if int(scores.argmax()) == EOS:
                break
            greedily.append(int(scores.argmax()))
        assert texts(search([table], [6], SearchOptions(1, penalty))) == [[greedily]]


def test_special_tokens_are_never_predicted() -> None:
    """Half of the probability lies on them."""
    results = search([Table(seed) for seed in range(8)], [6] * 8, SearchOptions(3, PENALTIES["average"], n_best=3))
    predicted = {token for found in texts(results) for tokens in found for token in tokens}
    assert predicted == set(TOKENS)


def test_the_minimum_length_is_kept_and_gives_way_to_the_limit() -> None:
    eager = Table(3, ending=9.0)
    lengths = [
        [
            len(tokens)
            for tokens in texts(search([eager], [limit], SearchOptions(2, PENALTIES["none"], min_length=3)))[0]
        ]
        for limit in (8, 3, 2, 0)
    ]
    assert lengths == [[3], [3], [2], [0]]


def test_equal_scores_are_ordered_by_beam_then_token() -> None:
    """All tokens alike at every step: the lowest ids of the first hypotheses are taken."""
    uniform = Table(0, sharpness=0.0)
    [found] = texts(search([uniform], [2], SearchOptions(3, PENALTIES["average"], n_best=3, min_length=2)))
    assert found == [[4, 4], [4, 5], [4, 6]]


@pytest.mark.parametrize("ranking", [FAST, EXACT])
def test_scores_that_are_no_numbers_are_a_fault_of_the_model(ranking: Ranking) -> None:
    table = Table(1)
    table.known[(4,)] = table.known[(5,)] = table.known[(6,)] = table.known[(7,)] = np.full(VOCAB, np.nan)
    with pytest.raises(RunError, match="not numbers"):
        search([table], [5], SearchOptions(2, PENALTIES["none"]), ranking)


@EVERY_PENALTY
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_what_is_not_close_survives_any_noise_below_the_tolerance(penalty: LengthPenalty, beam: int) -> None:
    """Scores off by up to half the tolerance in sum: another result only where `close` says so."""
    tolerance, limit = 0.1, 5
    close = changed = runs = 0
    for seed, n_best in itertools.product(range(60), {1, beam}):
        options, ranking = SearchOptions(beam, penalty, n_best), FastRanking(tolerance)
        table = Table(seed, ending=(-0.5, 0.5, 1.5)[seed % 3], sharpness=1.0)
        noisy = replace(table, noise=0.499 * tolerance / math.sqrt(limit + 1), known={})
        [plain], [other] = search([table], [limit], options, ranking), search([noisy], [limit], options, ranking)
        if texts([plain]) != texts([other]):
            changed += 1
            assert plain.close
            assert other.close
        close += plain.close
        runs += 1
    assert 0 < close < runs, "neither never nor always"
    assert changed > 0, "the noise must matter for this test to mean something"


@pytest.mark.parametrize("gap", [0.001, -0.001, 0.5, -0.5])
@pytest.mark.parametrize(
    ("beam", "rival"),
    [
        pytest.param(1, -1.0, id="what-is-likeliest"),
        pytest.param(2, -1.0, id="whether-to-stop"),
        pytest.param(3, -6.0, id="whether-it-ends-within-the-beam"),
    ],
)
def test_an_ending_that_is_hardly_better_or_worse_than_its_rival_is_close(beam: int, rival: float, gap: float) -> None:
    """First tokens 4 and EOS at -1, or 4, 5, 6 and EOS at -0.5, -3, -6: EOS is `gap` better than its rival."""
    table = Table(0)
    first = np.full(VOCAB, -20.0)
    first[[4, 5, 6, 7]] = (-1.0, -7.0, -9.0, -11.0) if beam < 3 else (-0.5, -3.0, -6.0, -11.0)
    first[EOS] = rival + gap
    table.known[()] = first
    for prefix in ((4,), (5,), (6,), (7,)):  # whatever goes on has one way to go
        table.known[prefix] = np.where(np.arange(VOCAB) == EOS, -1e-9, -30.0 - np.arange(VOCAB))
    [found] = search([table], [1], SearchOptions(beam, PENALTIES["none"]), FastRanking(0.01))
    assert found.close == (abs(gap) < 0.01)


def test_nothing_is_close_without_a_tolerance() -> None:
    results = search([Table(seed, sharpness=0.0) for seed in range(5)], [4] * 5, SearchOptions(3, PENALTIES["gnmt"]))
    assert not any(result.close for result in results)


# With models.

MODEL = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=48, heads=4, d_k=6, d_v=10)


def build(seed: int, **changes: object) -> Transformer:
    model = Transformer(replace(MODEL, **changes), 24)  # type: ignore[arg-type]
    initialize(model, seed)
    with torch.no_grad():
        model.embedding.weight.mul_(2.0)  # sharper scores
    return model.eval()


def sources(seed: int, lengths: tuple[int, ...] = (9, 1, 5, 3, 7, 2)) -> Tensor:
    ids = torch.randint(4, 24, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(lengths):
        ids[row, length - 1], ids[row, length:] = EOS, PAD
    return ids


class UncachedScorer:
    """Every step runs the whole model over everything so far, one sentence at a time, without padding."""

    def __init__(self, model: Transformer, source: Tensor) -> None:
        self._model, self._source = model, [row[row != PAD][None] for row in source]
        self._prefixes = [[] for _ in source]  # type: list[list[int]]

    @torch.no_grad()
    def step(self, tokens: Ids) -> Tensor:
        width = len(tokens) // len(self._source)
        self._prefixes = [[*prefix, int(token)] for prefix, token in zip(self._prefixes, tokens, strict=True)]
        scores = []
        for number, source in enumerate(self._source):
            prefixes = torch.tensor(self._prefixes[number * width : (number + 1) * width])
            hidden = self._model(source.expand(width, -1), prefixes)
            scores.append(self._model.logits(hidden)[:, -1].double().log_softmax(-1))
        return torch.cat(scores)

    def select(self, hypotheses: Ids, sentences: Ids) -> None:
        self._prefixes = [self._prefixes[i] for i in hypotheses]
        self._source = [self._source[i] for i in sentences]


@pytest.mark.parametrize(("norm", "attention"), [("post", "sdpa"), ("pre", "sdpa"), ("pre", "reference")])
def test_cached_search_equals_uncached(norm: str, attention: str) -> None:
    lengths = set()
    for seed in range(3):
        model, source = build(seed, norm=norm, attention=attention), sources(seed)
        limits = [int(n) + 8 for n in (source != PAD).sum(1)]
        options = SearchOptions(4, PENALTIES["gnmt"], n_best=4)
        found = beam_search(ModelScorer([model], source), limits, options, FAST)
        expected = beam_search(UncachedScorer(model, source), limits, options, FAST)
        assert texts(found) == texts(expected)
        for one, other in zip(found, expected, strict=True):
            assert [h.score for h in one.hypotheses] == pytest.approx([h.score for h in other.hypotheses], abs=1e-5)
        lengths |= {len(tokens) for hypotheses in texts(found) for tokens in hypotheses}
    assert len(lengths) > 4, "outputs must end at different steps for this test to mean something"


def test_a_beam_of_one_is_greedy_decoding() -> None:
    for seed in range(6):
        model, source = build(seed), sources(seed)
        limits = [int(n) - 1 + 20 for n in (source != PAD).sum(1)]
        for penalty in (PENALTIES["gnmt"], PENALTIES["none"]):
            found = beam_search(ModelScorer([model], source), limits, SearchOptions(1, penalty), FAST)
            assert texts(found) == [[tokens] for tokens in greedy(model, source, max_extra=20)]


def test_hypotheses_of_a_sentence_share_what_was_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-attention asks for all hypotheses of a sentence at once: keys and values are not copied for each."""
    shapes: list[tuple[int, int, int]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        shapes.append((query.size(0), query.size(2), key.size(2)))
        return fused(query, key, value, **options)  # type: ignore[arg-type]

    scorer = ModelScorer([build(1)], sources(1))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    options = SearchOptions(4, Exhaustive(PENALTIES["none"].divisor))
    beam_search(scorer, [1] * 6, options, FAST)
    assert shapes == [(6, 1, 1), (6, 1, 9)] * 2 + [(24, 1, 2), (6, 4, 9)] * 2


def test_hypotheses_that_stay_where_they_are_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam of one moves something only when the first of its two sentences has ended."""
    moved: list[list[int]] = []
    reorder = DecoderCache.reorder

    def counted(cache: DecoderCache, rows: Tensor) -> None:
        moved.append(rows.tolist())
        reorder(cache, rows)

    monkeypatch.setattr(DecoderCache, "reorder", counted)
    model, source = build(3), sources(3, (5, 5))
    with torch.no_grad():
        model.embedding.weight[EOS] = 0.0  # improbable: each sentence goes on to its limit
    found = beam_search(ModelScorer([model], source), [4, 12], SearchOptions(1, PENALTIES["none"]), FAST)
    assert [len(tokens) for [tokens] in texts(found)] == [4, 12]
    assert moved == [[1]]


def test_an_ensemble_averages_probabilities() -> None:
    models, source = [build(1), build(2), build(3, decoder_layers=1)], sources(1)
    tokens = np.full(6, BOS, dtype=np.int64)
    alone = [ModelScorer([model], source).step(tokens).double().exp() for model in models]
    together = ModelScorer(models, source).step(tokens)
    assert torch.allclose(together.double().exp(), sum(alone) / 3, atol=1e-6)  # type: ignore[arg-type, operator]
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)
    assert together.max().item() <= 0.0


def test_an_ensemble_of_a_model_with_itself_is_the_model() -> None:
    model, source = build(4), sources(4)
    limits = [15] * 6
    options = SearchOptions(4, PENALTIES["gnmt"], n_best=4)
    alone = beam_search(ModelScorer([model], source), limits, options, FAST)
    thrice = beam_search(ModelScorer([model] * 3, source), limits, options, FAST)
    assert texts(thrice) == texts(alone)
    for one, other in zip(thrice, alone, strict=True):
        assert [h.score for h in one.hypotheses] == pytest.approx([h.score for h in other.hypotheses], abs=1e-5)
