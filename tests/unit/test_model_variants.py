"""Members of the family: each part against an independent formula, each whole model trained, cached and counted."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.api import BOS, EOS, PAD
from dist_tfm.config.loading import SECTIONS, check_sections
from dist_tfm.config.schema import DataConfig, ModelConfig
from dist_tfm.errors import ConfigError
from dist_tfm.inference.cache import DecoderCache
from dist_tfm.inference.greedy import greedy
from dist_tfm.model.attention import MultiHeadAttention, attention_kernel
from dist_tfm.model.attention_kernels import attend_reference, attend_sdpa
from dist_tfm.model.embedding import Embedding
from dist_tfm.model.feed_forward import feed_forward
from dist_tfm.model.initialization import deep_norm_gain, initial_value, initialize
from dist_tfm.model.layers import EncoderLayer
from dist_tfm.model.norm import deep_norm_factors, layer_norm
from dist_tfm.model.positions import RelativePositions, RotaryPositions, concatenated_sinusoids, sinusoids
from dist_tfm.model.self_attention import self_attention
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss

SMALL = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=32, d_ff=48, heads=4, dropout=0.0)
VOCAB = 40
VARIANTS: Mapping[str, dict[str, object]] = {
    "deep": {"norm": "deep"},
    "rms": {"norm": "pre", "normalization": "rms"},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu"},
    "geglu": {"activation": "geglu"},
    "concatenated": {"positions": "sinusoidal_concatenated"},
    "learned": {"positions": "learned", "max_positions": 60},
    "rotary": {"positions": "rotary"},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_distance": 6},
    "t5": {
        **{"positions": "relative", "norm": "pre", "normalization": "rms", "activation": "geglu_tanh"},
        **{"tied": "inputs", "output_bias": True, "d_k": 6, "d_v": 6},
    },
    "marian": {
        **{"positions": "sinusoidal_concatenated", "activation": "silu", "attention_bias": True, "output_bias": True},
    },
    "window": {"self_attention": "window", "window": 2},
    "window_relative": {
        **{"self_attention": "window", "window": 3, "positions": "relative", "kv_heads": 2, "attention": "reference"},
        **{"relative_buckets": 8, "relative_distance": 6},
    },
    "linear": {"self_attention": "linear"},
    "linear_narrow": {"self_attention": "linear", "d_k": 2, "kv_heads": 2, "norm": "pre"},
    "final_norm": {"final_norm": True, "attention_bias": True},
    "grouped": {"kv_heads": 2},
    "multi_query": {"kv_heads": 1, "attention": "reference"},
    "decoder_tied": {"tied": "decoder"},
    "untied": {"tied": "none"},
    "two_vocabularies": {"tied": "decoder", "source_vocabulary": 53},
    "two_untied": {"tied": "none", "source_vocabulary": 47},
    "modern": {
        **{"norm": "pre", "normalization": "rms", "activation": "swiglu", "positions": "rotary", "kv_heads": 2},
        **{"tied": "decoder", "encoder_layers": 3, "decoder_layers": 1, "d_k": 6, "d_v": 10},
    },
}
EVERY = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def build(changes: Mapping[str, object], seed: int = 3) -> Transformer:
    named = dict(changes)
    source_vocabulary = cast(int | None, named.pop("source_vocabulary", None))
    config = replace(SMALL, **named)  # type: ignore[arg-type]
    model = Transformer(config, VOCAB, source_vocabulary)
    initialize(model, seed, deep_norm_gain(config))
    return model


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Source, target input and labels of four pairs of different lengths; the task: say the source backwards."""
    source, target_in, labels = (torch.full((4, 8), PAD) for _ in range(3))
    for row, length in enumerate((7, 3, 5, 1)):
        words = ids(1, length, seed=row)[0]
        source[row, : length + 1] = torch.tensor([*words, EOS])
        labels[row, : length + 1] = torch.tensor([*words.flip(0), EOS])
        target_in[row, : length + 1] = torch.tensor([BOS, *words.flip(0)])
    return source, target_in, labels


@EVERY
def test_every_variant_trains(changes: Mapping[str, object]) -> None:
    """Twenty steps bring the loss down, and every parameter has a gradient that is not zero."""
    loss_of = TranslationLoss(build(changes), label_smoothing=0.1)
    adam = torch.optim.AdamW(loss_of.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss, _ = loss_of(*batch())
        adam.zero_grad()
        loss.backward()
        for name, parameter in loss_of.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@EVERY
@torch.no_grad()
def test_decoding_with_a_cache_sees_what_training_saw(changes: Mapping[str, object]) -> None:
    model = build(changes).eval()
    source, target_in, _ = batch()
    whole = model(source, target_in)
    cache = DecoderCache(model, source)
    # One by one, then two at a time: positions must go on from the cache.
    steps = [cache.step(target_in[:, i : i + 1]) for i in range(4)]
    steps += [cache.step(target_in[:, i : i + 2]) for i in range(4, 8, 2)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_a_later_token_and_padding_change_nothing(changes: Mapping[str, object]) -> None:
    model = build(changes).eval()
    source, target_in, _ = batch()
    before = model(source, target_in)
    changed = target_in.clone()
    changed[:, 5] = 9
    assert torch.equal(model(source, changed)[:, :5], before[:, :5])
    assert not torch.equal(model(source, changed)[0, 5:], before[0, 5:])
    padded = model(F.pad(source, (0, 3), value=PAD), F.pad(target_in, (0, 2), value=PAD))[:, :8]
    real = target_in != PAD
    torch.testing.assert_close(padded[real], before[real], rtol=1e-5, atol=1e-5)


@EVERY
@torch.no_grad()
def test_greedy_decoding_stays_inside_what_the_model_knows(changes: Mapping[str, object]) -> None:
    model = build(changes).eval()
    outputs = greedy(model, ids(2, 50), max_extra=40)
    end = 59 if changes.get("positions") == "learned" else 89
    assert all(len(output) <= end for output in outputs)
    assert max(map(len, outputs)) == end or any(output[-1:] != [EOS] for output in outputs)


def test_gated_feed_forward_is_the_formula_of_its_paper() -> None:
    for name, activation in (
        ("swiglu", lambda x: x * torch.sigmoid(x)),
        ("geglu", exact_gelu),
        ("geglu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    ):
        layer = feed_forward(replace(SMALL, activation=name))  # type: ignore[arg-type]
        x = random(2, 3, 32)
        gate, up, down = (dict(layer.named_parameters())[f"{part}.weight"] for part in ("gate", "up", "down"))
        expected = (activation(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    for name, activation in (("gelu", exact_gelu), ("silu", lambda x: x * torch.sigmoid(x))):
        plain = feed_forward(replace(SMALL, activation=name))  # type: ignore[arg-type]
        assert isinstance(plain.up, nn.Linear)
        expected = plain.down(activation(plain.up(x)))
        torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-6)


def exact_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    norm = layer_norm(replace(SMALL, normalization="rms", layer_norm_eps=1e-3)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 32))
    x = (300.0 * random(4, 32)).to(dtype)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_deep_norm_weighs_the_residual_and_the_initial_weights() -> None:
    """Wang et al. 2022, figure 2, of an encoder of 6 and a decoder of 18 layers."""
    config = replace(SMALL, norm="deep", encoder_layers=6, decoder_layers=18)
    alpha, beta = deep_norm_factors(config, "encoder")
    assert alpha == pytest.approx(0.81 * (6**4 * 18) ** (1 / 16))
    assert beta == pytest.approx(0.87 * (6**4 * 18) ** (-1 / 16))
    assert deep_norm_factors(config, "decoder") == pytest.approx(((3 * 18) ** 0.25, (12 * 18) ** -0.25))
    layer = EncoderLayer(config, attend_sdpa)
    x, mask = random(2, 5, 32), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    first = layer.self_attention_norm(alpha * x + layer.self_attention(x, x, mask, False))
    expected = layer.feed_forward_norm(alpha * first + layer.feed_forward(first))
    torch.testing.assert_close(layer(x, mask), expected)
    gain = deep_norm_gain(config)
    scaled, plain = "decoder.layers.3.feed_forward.up.weight", "decoder.layers.3.self_attention.query.weight"
    for name, factor in ((scaled, (12 * 18) ** -0.25), (plain, 1.0)):
        drawn = initial_value(name, (48, 32), 5, gain(name))
        torch.testing.assert_close(drawn, factor * initial_value(name, (48, 32), 5))
    assert gain("embedding.weight") == 1.0
    assert deep_norm_gain(SMALL)(scaled) == 1.0


def test_concatenated_sinusoids_are_the_papers_in_another_order() -> None:
    for width in (6, 7):
        table, ours = sinusoids(50, width), concatenated_sinusoids(50, width)
        assert torch.equal(ours, torch.cat([table[:, 0::2], table[:, 1::2]], dim=1))


def test_rotary_positions_turn_planes_and_leave_products_to_the_distance() -> None:
    rotary = RotaryPositions(6)
    x = random(2, 3, 300, 6)
    turned = rotary.rotate(x, first=5)
    for feature, position in ((0, 7), (1, 299), (2, 0)):
        angle = (5 + position) * 10_000 ** (-2 * feature / 6)
        plane = torch.complex(x[:, :, position, 2 * feature].double(), x[:, :, position, 2 * feature + 1].double())
        expected = plane * complex(math.cos(angle), math.sin(angle))
        torch.testing.assert_close(turned[:, :, position, 2 * feature].double(), expected.real, rtol=0, atol=1e-5)
        torch.testing.assert_close(turned[:, :, position, 2 * feature + 1].double(), expected.imag, rtol=0, atol=1e-5)
    query, key = random(1, 1, 1, 6, seed=2), random(1, 1, 1, 6, seed=3)

    def product(at: int, other: int) -> float:
        return float((rotary.rotate(query, at) * rotary.rotate(key, other)).sum())

    assert product(9, 4) == pytest.approx(product(905, 900), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


@pytest.mark.parametrize("attend", [attend_sdpa, lambda *a: attend_reference(*a).output], ids=["sdpa", "reference"])
def test_grouped_heads_share_keys_and_values(attend: object) -> None:
    """As if each group's projections were written out once a head."""
    grouped = MultiHeadAttention(replace(SMALL, kv_heads=2, d_k=6, d_v=10), attend)  # type: ignore[arg-type]
    full = MultiHeadAttention(replace(SMALL, d_k=6, d_v=10), attend)  # type: ignore[arg-type]
    with torch.no_grad():
        for part, width in (("key", 6), ("value", 10)):
            shared = getattr(grouped, part).weight.view(2, width, 32)
            getattr(full, part).weight.copy_(shared[[0, 0, 1, 1]].reshape(4 * width, 32))
        full.query.weight.copy_(grouped.query.weight)
        full.output.weight.copy_(grouped.output.weight)
    x, memory = random(2, 5, 32), random(2, 7, 32, seed=4)
    torch.testing.assert_close(grouped(x, memory, None, False), full(x, memory, None, False))
    assert grouped.keys_values(memory).keys.shape == (2, 2, 7, 6)


@torch.no_grad()
def test_learned_positions_are_rows_of_a_table_and_end_with_it() -> None:
    embedding = Embedding(replace(SMALL, positions="learned", max_positions=10), VOCAB).eval()
    tokens = ids(2, 4)
    table = dict(embedding.named_parameters())["positions.weight"]
    torch.testing.assert_close(embedding(tokens, 6), embedding.weight[tokens] * 32**0.5 + table[6:10])
    with pytest.raises(ValueError, match=r"max_positions=10 positions, found 11"):
        embedding(tokens, 7)


def bucket(distance: int, causal: bool, count: int, farthest: int) -> int:
    """Raffel et al. 2020, section 2.1, by integers: the largest step whose logarithm is not above the distance's."""
    if not causal:
        return bucket(-abs(distance), True, count // 2, farthest) + (count // 2 if distance > 0 else 0)
    away, single = max(0, -distance), count // 2
    if away < single:
        return away
    # away / single >= (farthest / single)^(step / (count - single)), without a logarithm
    steps = [
        s
        for s in range(count - single)
        if away ** (count - single) * single**s >= farthest**s * single ** (count - single)
    ]
    return single + max(steps)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 20)])
def test_relative_buckets_are_those_of_t5(causal: bool, count: int, farthest: int) -> None:
    config = replace(SMALL, positions="relative", relative_buckets=count, relative_distance=farthest)
    distances = [*range(-300, 301), -100_000, 100_000]
    found = RelativePositions(config, causal).buckets(torch.tensor(distances)).tolist()
    assert found == [bucket(distance, causal, count, farthest) for distance in distances]
    nowhere = set() if causal else {count // 2}  # distance 0 is not in front
    assert set(found) == set(range(count)) - nowhere


@pytest.mark.parametrize("kernel", ["sdpa", "matmul", "reference"])
@torch.no_grad()
def test_relative_positions_are_added_to_the_scores(kernel: Any) -> None:
    """softmax(q k / sqrt(d_k) + table), written out, with pads; the causal one also as a cache asks for it."""
    config = replace(SMALL, positions="relative", d_k=6, d_v=10, relative_buckets=8, relative_distance=6)
    for causal in (False, True):
        layer = self_attention(config, attention_kernel(kernel), causal)
        x, mask = random(2, 9, 32), torch.tensor([9, 5])[:, None] > torch.arange(9)
        query, key, value = (
            part(x).view(2, 9, 4, -1).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
        )
        assert layer.relative is not None
        table = torch.tensor([[bucket(k - q, causal, 8, 6) for k in range(9)] for q in range(9)])
        scores = query @ key.mT / 6**0.5 + layer.relative.weight[:, table]
        visible = mask[:, None, None] & (torch.ones(9, 9).tril().bool() if causal else True)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        expected = layer.output((weights @ value).transpose(1, 2).flatten(2))
        found = layer(x, x, mask[:, None, None], causal)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1, :5], expected[1, :5], rtol=1e-5, atol=1e-6)
    newest = layer.attend_to(x[:, 7:], layer.keys_values(x), mask[:, None, None], True, first=7)
    torch.testing.assert_close(newest[0], expected[0, 7:], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_final_norm_and_biases_are_where_they_belong() -> None:
    model = build({"final_norm": True, "output_bias": True}).eval()
    source, target_in, _ = batch()
    hidden = model(source, target_in)
    assert model.decoder.norm is not None
    model.decoder.norm.bias.fill_(3.0)
    torch.testing.assert_close(model(source, target_in), hidden + 3.0)
    assert model.output_bias is not None
    before = model.logits(hidden)
    model.output_bias.copy_(torch.arange(VOCAB))
    torch.testing.assert_close(model.logits(hidden), before + torch.arange(VOCAB))
    assert build({"norm": "pre", "final_norm": False}).encoder.norm is None


@torch.no_grad()
def test_what_is_tied_is_one_matrix_and_what_is_not_is_not() -> None:
    names = {tied: {name for name, _ in build({"tied": tied}).named_parameters() if "layers" not in name}
             for tied in ("all", "inputs", "decoder", "none")}  # fmt: skip
    assert names["all"] == {"embedding.weight"}
    assert names["inputs"] == {"embedding.weight", "projection.weight"}
    assert names["decoder"] == {"embedding.weight", "source_embedding.weight"}
    assert names["none"] == {"embedding.weight", "source_embedding.weight", "projection.weight"}
    source = batch()[0]
    for tied, touched in (
        ("all", (True, True)),
        ("inputs", (True, False)),
        ("decoder", (False, True)),
        ("none", (False, False)),
    ):
        model = build({"tied": tied}).eval()
        memory, hidden = model.encode(source), random(3, 32)
        logits = model.logits(hidden)
        model.embedding.weight.mul_(2.0)
        found = (not torch.equal(model.encode(source), memory), not torch.equal(model.logits(hidden), logits))
        assert found == touched, tied


@torch.no_grad()
def test_two_vocabularies_embed_the_source_in_its_own() -> None:
    """Of equal sizes they are the model that has its source embedding apart; further source tokens are further rows."""
    plain, same = build({"tied": "decoder"}).eval(), build({"tied": "decoder", "source_vocabulary": VOCAB}).eval()
    source, target_in, _ = batch()
    assert torch.equal(plain(source, target_in), same(source, target_in))
    model = build({"tied": "decoder", "source_vocabulary": VOCAB + 9}).eval()
    source[0, :3] = VOCAB + 8
    logits = model.logits(model(source, target_in))
    assert logits.shape == (4, 8, VOCAB), "scores are over the target's vocabulary"
    before = model.encode(source)
    model.source_embedding.weight[VOCAB + 8].mul_(2.0)  # type: ignore[union-attr]
    after = model.encode(source)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])
    with pytest.raises(ValueError, match=r"one vocabulary \(model\.tied=all\), found 41 source and 40 target"):
        Transformer(SMALL, VOCAB, VOCAB + 1)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(SMALL, kv_heads=3), "model.kv_heads: expected a divisor of model.heads=4, found 3"),
        (replace(SMALL, positions="rotary", d_k=5, d_v=8), "d_k must be even, found 5"),
        (replace(SMALL, self_attention="linear", positions="rotary"), "no scores that model.positions=rotary"),
        (replace(SMALL, self_attention="linear", attention_dropout=0.1), "expected 0 .* no weights to drop, found 0.1"),
        (replace(SMALL, positions="relative", relative_buckets=7), "expected an even number .* found 7"),
        (replace(SMALL, positions="relative", relative_distance=16), "relative_distance=16, found 32"),
        (replace(SMALL, positions="learned", max_positions=250), "more than data.max_length=250"),
    ],
)
def test_parts_that_do_not_fit_are_refused(model: ModelConfig, said: str) -> None:
    sections = {name: make() for name, make in SECTIONS.items()} | {"model": model, "data": DataConfig()}
    with pytest.raises(ConfigError, match=said):
        check_sections(sections)
