"""Divided layers against whole ones, in float64: loss, every gradient, what is sent, what is held, what is drawn.

The ranks are threads; tests/distributed has the same on processes, with the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dist_tfm.training.loss as loss_module
from data_pipeline.api import PAD, zero_weight_batch
from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.attention_kernels import Weighting, attend_sdpa
from dist_tfm.model.initialization import deep_norm_gain, initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel import layers
from dist_tfm.parallel.axis import Alone, Axis
from dist_tfm.parallel.layers import DividedAttend, VocabularyShard, interval, own_randomness
from dist_tfm.parallel.plan import divide
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.traffic import tensor_traffic
from dist_tfm.training.loss import TranslationLoss, smoothed_cross_entropy
from tests.batches import step_batches
from tests.threads import ThreadAxis, on_ranks

torch.set_num_threads(1)
VOCABULARY = 101  # a prime: no number of ranks divides it
CONFIG = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=16, d_ff=24, heads=4, dropout=0.0)
SMOOTHING = 0.1


def build(config: ModelConfig, axis: Axis, source_vocabulary: int | None = None) -> TranslationLoss:
    model = Transformer(config, VOCABULARY, source_vocabulary).double()
    initialize(model, 1, deep_norm_gain(config))
    divide(model, axis)
    return TranslationLoss(model, SMOOTHING, axis)


def batch() -> list[Tensor]:
    ragged = step_batches(1, 4)[0]
    return [torch.from_numpy(array) for array in (ragged.source, ragged.target_in, ragged.labels)]


def gradients(loss: TranslationLoss, *inputs: Any) -> dict[str, Tensor]:
    """Loss and nll, and every gradient, by canonical name."""
    loss_sum, nll_sum = loss(*inputs)
    loss_sum.backward()
    found = {tag_of(p).name: p.grad for p in loss.model.parameters() if p.grad is not None}
    assert len(found) == len(list(loss.model.parameters()))
    return {"loss": loss_sum.detach(), "nll": nll_sum, **found}


def worst_difference(config: ModelConfig, size: int, source_vocabulary: int | None = None) -> float:
    """Largest relative difference between what the ranks compute and the same part of the whole."""
    whole = gradients(build(config, Alone(), source_vocabulary), *batch())

    def work(axis: Axis) -> list[float]:
        loss = build(config, axis, source_vocabulary)
        found = gradients(loss, *batch())
        differences = [float((found[name] - whole[name]).abs() / whole[name]) for name in ("loss", "nll")]
        for parameter in loss.model.parameters():
            tag = tag_of(parameter)
            part = whole[tag.name].narrow(tag.dim, tag.low, tag.high - tag.low)
            # A key's bias adds the same to all scores of a query: its gradient is 0 but for rounding.
            size_of_whole = max(float(whole[tag.name].norm()), 1e-2)
            differences.append(float((found[tag.name] - part).norm()) / size_of_whole)
        return differences

    return max(value for rank in on_ranks(size, work) for value in rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_loss_and_every_gradient_equal_the_whole_models(norm: Any, size: int) -> None:
    assert worst_difference(replace(CONFIG, norm=norm), size) < 1e-12


def test_head_widths_need_not_divide_d_model() -> None:
    assert worst_difference(replace(CONFIG, heads=6, d_k=3, d_v=5), 3) < 1e-12


@pytest.mark.parametrize(
    "variant",
    [
        {"activation": "swiglu", "normalization": "rms", "positions": "rotary", "kv_heads": 2, "norm": "pre"},
        {"activation": "gelu", "norm": "deep", "positions": "sinusoidal_concatenated", "tied": "decoder"},
        {"activation": "geglu", "positions": "learned", "max_positions": 50, "tied": "none"},
        {"positions": "relative", "norm": "pre", "normalization": "rms", "tied": "inputs", "activation": "geglu_tanh"},
        {"attention_bias": True, "output_bias": True, "final_norm": True, "activation": "silu", "kv_heads": 2},
        {"self_attention": "window", "window": 3, "positions": "relative", "kv_heads": 2},
        {"self_attention": "linear", "d_k": 3, "d_v": 5},
    ],
    ids=["modern", "deep", "untied", "t5", "marian", "window", "linear"],
)
def test_variants_of_the_model_equal_the_whole_ones(variant: dict[str, Any]) -> None:
    assert worst_difference(replace(CONFIG, **variant), 2) < 1e-12


@pytest.mark.parametrize("tied", ["decoder", "none"])
def test_two_vocabularies_are_divided_each_by_its_own_size(tied: Any) -> None:
    assert worst_difference(replace(CONFIG, tied=tied), 2, VOCABULARY + 22) < 1e-12


def _forgets(x: Tensor, axis: Axis) -> Tensor:
    return x


def _enters_twice(x: Tensor, axis: Axis) -> Tensor:
    twice: Tensor = layers._Enter.apply(layers._Enter.apply(x, axis), axis)  # type: ignore[no-untyped-call]
    return twice


@pytest.mark.parametrize(("border", "mutant"), [("leave", _forgets), ("enter", _forgets), ("enter", _enters_twice)])
def test_comparison_rejects_wrong_border(border: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, border, mutant)
    assert worst_difference(CONFIG, 2) > 1e-2


def test_comparison_rejects_a_projection_that_does_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "enter", _forgets)
    assert worst_difference(CONFIG, 2) > 1e-2


def test_comparison_rejects_a_tied_gradient_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients(build(CONFIG, Alone()), *batch())["embedding.weight"]

    def work(axis: Axis) -> float:
        loss = build(CONFIG, axis)
        loss.model.embedding.weight.register_hook(lambda gradient: gradient * 2)
        found, tag = gradients(loss, *batch())["embedding.weight"], tag_of(loss.model.embedding.weight)
        return float((found - right[tag.low : tag.high]).norm() / right.norm())

    assert min(on_ranks(2, work)) > 1e-2


def test_replicas_have_the_same_bits_on_every_rank() -> None:
    def work(axis: Axis) -> dict[str, Tensor]:
        loss = build(replace(CONFIG, norm="pre"), axis).float()
        found = gradients(loss, *batch())
        return {tag_of(p).name: found[tag_of(p).name] for p in loss.model.parameters() if tag_of(p).whole}

    first, second = on_ranks(2, work)
    assert sorted(first) == sorted(second)
    assert {"encoder.layers.0.feed_forward.down.bias", "decoder.norm.weight"} <= set(first)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_element_has_one_writer() -> None:
    config = replace(CONFIG, heads=3, d_k=4, d_v=5)
    counts = {name: torch.zeros(p.shape) for name, p in Transformer(config, VOCABULARY).named_parameters()}
    for tags in on_ranks(3, lambda axis: [tag_of(p) for p in build(config, axis).model.parameters()]):
        assert {tag.name: tag.shape for tag in tags} == {name: tuple(count.shape) for name, count in counts.items()}
        for tag in tags:
            counts[tag.name].narrow(tag.dim, tag.low, tag.high - tag.low).add_(int(tag.writer))
    assert all(bool((count == 1).all()) for count in counts.values())


class _Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.seen.add(tuple(value.shape))
        return result


@pytest.mark.parametrize(("size", "whole"), [(1, True), (2, False)])
def test_no_rank_makes_a_whole_inner_layer_or_whole_logits(size: int, whole: bool) -> None:
    """d_ff = 56 and V = 101 are no other dimension of this model or batch: no tensor may have one."""

    def work(axis: Axis) -> set[int]:
        loss = build(replace(CONFIG, d_ff=56), axis if size > 1 else Alone())
        held = {dim for p in loss.parameters() for dim in p.shape}
        with _Shapes() as shapes:
            gradients(loss, *batch())
        return held | {dim for shape in shapes.seen for dim in shape}

    for dims in on_ranks(size, work):
        assert ({56, VOCABULARY} <= dims) is whole
        assert ({56, VOCABULARY} & dims == set()) is not whole


@pytest.mark.parametrize(("encoder", "decoder"), [(2, 2), (3, 1)])
def test_bytes_sent_equal_the_formulas(encoder: int, decoder: int) -> None:
    config = replace(CONFIG, encoder_layers=encoder, decoder_layers=decoder)
    source, target_in, labels = batch()
    real = int((labels != PAD).sum())
    expected = tensor_traffic(config, source.numel(), target_in.numel(), real, item_bytes=8)

    def work(axis: Axis) -> list[list[tuple[str, int]]]:
        assert isinstance(axis, ThreadAxis)
        loss = build(config, axis)
        loss_sum, _ = loss(source, target_in, labels)
        forward, axis.given = axis.given, []
        loss_sum.backward()
        return [forward, axis.given]

    for forward, backward in on_ranks(2, work):
        assert 8 * sum(n for _, n in forward[:-2]) == expected.forward
        assert forward[-2:] == [("maximum", real), ("sum", 3 * real)]
        assert expected.loss == 4 * 4 * real
        assert 8 * sum(n for _, n in backward) == expected.backward
        assert len(forward) == 2 + 2 * encoder + 3 * decoder + 2  # one message a sublayer
        assert len(backward) == 2 * encoder + 4 * decoder + 1


@pytest.mark.parametrize("vocabulary", [4001, 4000, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_divided_cross_entropy_equals_the_whole_one(vocabulary: int, smoothing: float) -> None:
    """4,001 tokens at two ranks: no padded column is there to be counted; the right one may be any."""
    generator = torch.Generator().manual_seed(vocabulary)
    scores = 3 * torch.randn(9, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (9,), generator=generator)
    labels[:3] = torch.tensor([0, vocabulary // 2, vocabulary - 1])
    whole = scores.clone().requires_grad_()
    expected, expected_nll = smoothed_cross_entropy(whole, labels, smoothing)
    (0.7 * expected).backward()
    assert whole.grad is not None
    slopes = whole.grad

    def work(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        shard = VocabularyShard(axis, vocabulary)
        part = scores[:, shard.low : shard.high].clone().requires_grad_()
        loss, nll = smoothed_cross_entropy(part, labels, smoothing, shard)
        (0.7 * loss).backward()
        assert part.grad is not None
        return loss.detach(), nll, part.grad

    found = on_ranks(2, work)
    for loss, nll, _ in found:
        assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-13)
        assert float(nll) == pytest.approx(float(expected_nll), rel=1e-13)
    assert torch.allclose(torch.cat([slope for _, _, slope in found], dim=1), slopes, rtol=0, atol=1e-14)


def test_divided_cross_entropy_takes_scores_of_any_size_and_shows_non_finite_ones() -> None:
    labels = torch.tensor([0, 3])

    def work(scores: Tensor) -> Callable[[Axis], tuple[float, float]]:
        def on_rank(axis: Axis) -> tuple[float, float]:
            shard = VocabularyShard(axis, 4)
            loss, nll = smoothed_cross_entropy(scores[:, shard.low : shard.high].clone(), labels, 0.0, shard)
            return float(loss), float(nll)

        return on_rank

    extreme = torch.tensor([[1e4, -1e4, 0.0, 0.0], [-3e38, 0.0, 0.0, 3e38]])
    assert on_ranks(2, work(extreme)) == [(0.0, 0.0)] * 2
    for value in (float("nan"), float("inf")):
        spoilt = torch.zeros(2, 4)
        spoilt[1, 2] = value  # on the second rank alone
        for loss, _ in on_ranks(2, work(spoilt)):
            assert loss != loss or loss == float("inf")


def test_scores_of_another_shard_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens 0 to 5, found 4 scores"):
        smoothed_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]), 0.1, VocabularyShard(Alone(), 5))


def test_a_micro_batch_without_real_labels_contributes_nothing_and_tells_nothing() -> None:
    empty = zero_weight_batch()
    inputs = [torch.from_numpy(array) for array in (empty.source, empty.target_in, empty.labels)]

    def work(axis: Axis) -> tuple[dict[str, Tensor], list[str]]:
        assert isinstance(axis, ThreadAxis)
        found = gradients(build(CONFIG, axis), *inputs)
        return found, [operation for operation, _ in axis.given]

    for found, operations in on_ranks(2, work):
        assert all(bool((value == 0).all()) for value in found.values())
        assert "maximum" not in operations


def _attended(rank: int, training: bool, seed: int = 5) -> tuple[Tensor, Tensor]:
    """(output of divided attention over uniform keys and values of one, a number drawn afterwards)."""
    axis = Alone()
    axis.rank = rank
    torch.manual_seed(seed)
    query, ones = torch.zeros(8, 2, 40, 4), torch.ones(8, 2, 40, 4)
    output = DividedAttend(attend_sdpa, axis)(query, ones, ones, Weighting(dropout=0.25 if training else 0.0))
    return output, torch.rand(3)


def test_attention_dropout_is_each_ranks_own_and_reproducible() -> None:
    (first, after_first), (second, after_second) = _attended(0, True), _attended(1, True)
    assert torch.equal(after_first, after_second)  # outside the region all ranks draw alike
    assert not torch.equal(first, second)
    assert torch.equal(first, _attended(0, True)[0])
    assert torch.equal(second, _attended(1, True)[0])
    assert not torch.equal(first, _attended(0, True, seed=6)[0])
    # Of 40 equal probabilities each is kept with 3/4 and then divided by it.
    for output in (first, second):
        kept = output[..., 0] * 0.75
        assert float(kept.mean()) == pytest.approx(0.75, abs=0.01)
        assert float(kept.std()) == pytest.approx((0.25 * 0.75 / 40) ** 0.5, rel=0.15)
    joint = float(((first - 1) * (second - 1))[..., 0].mean() / first[..., 0].var())
    assert abs(joint) < 0.15  # uncorrelated


def test_without_dropout_nothing_is_drawn() -> None:
    output, after = _attended(0, False)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(output, torch.ones_like(output))


def test_a_failure_inside_a_region_leaves_the_generator_in_step() -> None:
    torch.manual_seed(5)
    with pytest.raises(KeyError), own_randomness(1, torch.device("cpu")):
        raise KeyError
    after = torch.rand(3)
    torch.manual_seed(5)
    with own_randomness(0, torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(("total", "size"), [(4001, 2), (10, 4), (3, 3), (7, 1)])
def test_intervals_cover_everything_in_order(total: int, size: int) -> None:
    parts = [interval(total, rank, size) for rank in range(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == total
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    assert max(high - low for low, high in parts) - min(high - low for low, high in parts) <= 1


def _refusals(change: Callable[[Transformer], None], size: int = 2, config: ModelConfig = CONFIG) -> Sequence[str]:
    def work(axis: Axis) -> str:
        model = Transformer(config, VOCABULARY)
        change(model)
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the callers look at the message)
            divide(model, axis)
        return str(refused.value)

    return on_ranks(size, work)


def test_what_cannot_be_divided_is_refused() -> None:
    assert "heads that 3 tensor-parallel ranks divide, found 4" in _refusals(lambda model: None, size=3)[0]
    shared = replace(CONFIG, kv_heads=1)
    assert (
        "keys and values that 2 tensor-parallel ranks divide, found 1"
        in _refusals(lambda model: None, config=shared)[0]
    )


def test_parameters_that_the_plan_does_not_know_are_refused() -> None:
    def new_module(model: Transformer) -> None:
        model.encoder.layers[0].gate = nn.Linear(2, 2)

    def new_projection(model: Transformer) -> None:
        model.encoder.layers[0].self_attention.extra = nn.Linear(16, 16)

    assert "encoder.layers.0.gate.weight" in _refusals(new_module)[0]
    assert "extra.bias" in _refusals(new_projection)[0]


def test_a_divided_model_scores_no_vocabulary() -> None:
    def work(axis: Axis) -> None:
        with pytest.raises(RuntimeError, match="a part of it"):
            build(CONFIG, axis).model.logits(torch.zeros(1, 16, dtype=torch.float64))

    on_ranks(2, work)


def test_one_rank_changes_nothing() -> None:
    model = Transformer(CONFIG, VOCABULARY)
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    divide(model, Alone())
    assert before == {name: (id(p), type(p)) for name, p in model.named_parameters()}
    assert all(tag_of(p).name == name and tag_of(p).writer for name, p in model.named_parameters())
