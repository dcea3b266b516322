"""Greedy decoding with a K/V cache equals decoding everything again at each step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from data_pipeline.api import BOS, EOS, PAD, UNK
from dist_tfm.config.schema import ModelConfig
from dist_tfm.inference.cache import DecoderCache, GrowingStore
from dist_tfm.inference.greedy import greedy
from dist_tfm.model.attention import KeysValues
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer

torch.set_num_threads(1)
VOCAB = 24
CONFIG = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=48, heads=4, d_k=6, d_v=10)
VARIANTS = pytest.mark.parametrize(
    ("norm", "attention"), [("post", "sdpa"), ("pre", "sdpa"), ("pre", "reference"), ("post", "reference")]
)


def build(seed: int = 3, **changes: object) -> Transformer:
    model = Transformer(replace(CONFIG, **changes), VOCAB)  # type: ignore[arg-type]
    initialize(model, seed)
    # Sharper scores, and hidden states that lean towards EOS often enough for sentences to end at different lengths.
    with torch.no_grad():
        model.embedding.weight.mul_(2.0)
    return model.eval()


def sources(lengths: tuple[int, ...] = (9, 1, 5, 3, 7, 2), seed: int = 1) -> Tensor:
    ids = torch.randint(4, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(lengths):
        ids[row, length - 1] = EOS
        ids[row, length:] = PAD
    return ids


@torch.no_grad()
def uncached(model: Transformer, source: Tensor, max_extra: int) -> list[list[int]]:
    """One sentence at a time, every step from the beginning."""
    results = []
    for row in source:
        real = row[row != PAD][None]
        output: list[int] = []
        while len(output) < real.size(1) - 1 + max_extra:
            scores = model.logits(model(real, torch.tensor([[BOS, *output]])))[0, -1].tolist()
            scores[PAD] = scores[BOS] = scores[UNK] = -float("inf")
            token = scores.index(max(scores))
            if token == EOS:
                break
            output.append(token)
        results.append(output)
    return results


@VARIANTS
def test_cached_decoding_equals_uncached_argmax(norm: str, attention: str) -> None:
    lengths = set()
    for seed in range(3):
        model = build(seed, norm=norm, attention=attention)
        found = greedy(model, sources(seed=seed), max_extra=20)
        assert found == uncached(model, sources(seed=seed), max_extra=20)
        lengths |= {len(output) for output in found}
    assert len(lengths) > 4, "sentences of a batch must end at different steps for this test to mean something"


@VARIANTS
def test_hidden_states_of_steps_equal_those_of_one_pass(norm: str, attention: str) -> None:
    """Positions, causality and growth of the buffers: 40 tokens, one or several at a time."""
    model, source = build(norm=norm, attention=attention), sources()
    target_in = torch.randint(4, VOCAB, (6, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model.decode(target_in, model.encode(source), model.source_mask(source))
    for pieces in ([1] * 40, [3, 1, 17, 2, 16, 1]):
        cache = DecoderCache(model, source)
        steps = [cache.step(piece) for piece in target_in.split(pieces, 1)]
        assert cache.length == 40
        assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)


def test_sentences_can_be_dropped_reordered_and_repeated_between_steps() -> None:
    model, source = build(), sources()
    target_in = torch.randint(4, VOCAB, (6, 4), generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([4, 0, 0, 5])
    cache = DecoderCache(model, source)
    cache.step(target_in[:, :3])
    cache.select(rows)
    found = cache.step(target_in[rows, 3:])
    with torch.no_grad():
        expected = model(source[rows], target_in[rows])
    assert torch.allclose(found, expected[:, 3:], atol=1e-5)


def test_every_step_costs_one_query_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    queries: list[tuple[int, int]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        queries.append((query.size(2), key.size(2)))
        return fused(query, key, value, **options)  # type: ignore[arg-type]

    cache = DecoderCache(model, sources())
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    for length in (1, 2, 3):
        queries.clear()
        cache.step(torch.full((6, 1), 5))
        assert queries == [(1, length), (1, 9)] * 2


def test_a_sentence_stops_at_its_own_limit() -> None:
    """A model that cannot end: EOS scores lowest of all."""
    model = build()
    with torch.no_grad():
        model.embedding.weight[EOS] = 0.0
        model.embedding.weight[EOS + 1 :, 0] = 50.0
        model.decoder.layers[-1].feed_forward_norm.bias[0] = 50.0  # type: ignore[union-attr, index, operator]
    found = greedy(model, sources(), max_extra=4)
    assert [len(output) for output in found] == [8 + 4, 0 + 4, 4 + 4, 2 + 4, 6 + 4, 1 + 4]
    assert [len(output) for output in greedy(model, sources(), max_extra=0)] == [8, 0, 4, 2, 6, 1]


def test_a_model_that_ends_at_once_gives_empty_translations() -> None:
    model = build()
    with torch.no_grad():
        model.embedding.weight[:, 0] = 0.0
        model.embedding.weight[EOS, 0] = 50.0
        model.decoder.layers[-1].feed_forward_norm.bias[0] = 50.0  # type: ignore[union-attr, index, operator]
    assert greedy(model, sources()) == [[]] * 6


def test_a_sentence_that_has_ended_stays_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted scores: the second sentence ends first and then "goes on" while the others are still decoded."""
    script = iter([[7, 8, 9], [7, EOS, 9], [7, 8, 9], [7, 8, EOS], [7, 8]])

    def scripted(hidden: Tensor) -> Tensor:
        tokens = next(script)[: hidden.size(0)]
        return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()[:, None]

    model = build()
    monkeypatch.setattr(model, "logits", scripted)
    assert greedy(model, sources((5, 5, 5)), max_extra=1) == [[7] * 5, [8], [9] * 3]


@pytest.mark.parametrize("special", [PAD, BOS, UNK])
def test_pad_bos_and_unk_are_never_predicted_even_if_they_score_highest(special: int) -> None:
    model = build()
    with torch.no_grad():
        model.embedding.weight[special] *= 0.0
        model.embedding.weight[special, 0] = 50.0
        model.decoder.layers[-1].feed_forward_norm.bias[0] = 50.0  # type: ignore[union-attr, index, operator]
    found = greedy(model, sources(), max_extra=5)
    assert sum(len(output) for output in found) > 0
    assert special not in {token for output in found for token in output}


def test_no_sentences_and_sentences_of_pads_alone() -> None:
    model = build()
    assert greedy(model, torch.empty(0, 4, dtype=torch.int64)) == []
    padded = torch.cat([sources(), torch.zeros(1, 9, dtype=torch.int64)])
    assert greedy(model, padded, max_extra=3)[:6] == greedy(model, sources(), max_extra=3)
    assert len(greedy(model, padded, max_extra=3)[6]) <= 3


def test_training_mode_and_negative_limits_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="0 or more, found -1"):
        greedy(model, sources(), max_extra=-1)
    with pytest.raises(ValueError, match="evaluation mode"):
        greedy(model.train(), sources())


def test_decoding_leaves_no_gradient_behind() -> None:
    cache = DecoderCache(build(), sources())
    assert not cache.step(torch.full((6, 1), BOS)).requires_grad


def test_views_handed_out_earlier_survive_later_appends() -> None:
    """Also across the growth of the buffers at 16, 32 and 64 positions."""
    store = GrowingStore()
    pieces = torch.randn(70, 2, 3, 1, 4)
    views = [store.append(KeysValues(piece, piece * 2)) for piece in pieces]
    whole = pieces.transpose(0, 3).squeeze(0).contiguous()
    for count, view in enumerate(views, 1):
        assert torch.equal(view.keys, whole[:, :, :count])
        assert torch.equal(view.values, 2 * whole[:, :, :count])
