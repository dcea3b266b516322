"""Activation checkpointing: the same gradients bit for bit, and less kept, for every value of the key."""

import pytest
import torch
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig, TrainConfig
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.plan import divide
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.recomputation import Recomputation, recomputation, recompute_inside
from tests.threads import on_ranks

torch.set_num_threads(1)
POLICIES = ("full", "every_2", "attention", "feed_forward")


def build(policy: str, axis: Axis | None = None, **changes: object) -> TranslationLoss:
    config = ModelConfig(
        **{
            **{"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "dropout": 0.2},
            **{"attention_dropout": 0.3, "attention": "matmul"},
            **changes,
        }  # type: ignore[arg-type]
    )
    model = Transformer(config, 30)
    initialize(model, 1)
    if axis is not None:
        divide(model, axis)
    recompute_inside(model, recomputation(policy).inside)
    return TranslationLoss(model, 0.1, axis)


def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source, target_in, labels = (torch.randint(4, 30, (3, n), generator=generator) for n in (12, 10, 10))
    labels[1, 3:] = 0
    source[2, 4:] = 0
    return source, target_in, labels


def step(policy: str, axis: Axis | None = None, **changes: object) -> tuple[list[Tensor], int]:
    """(loss and every gradient, elements that autograd kept for the backward pass, parameters apart)."""
    module, sizes = build(policy, axis, **changes), []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = module(*micro_batch(), SeededRunner(1, 5, 2, recomputation(policy).layers))
        kept = sum(sizes)
    torch.manual_seed(99)  # what the backward pass draws, it must not draw from here
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)], kept


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"norm": "pre", "activation": "swiglu"}], ids=["paper", "pre-norm, gated"])
def test_gradients_are_the_same_bit_for_bit_with_dropout_on(policy: str, changes: dict[str, str]) -> None:
    expected, _ = step("none", **changes)
    found, _ = step(policy, **changes)
    assert len(found) == len(expected) > 30
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)


def test_what_is_recomputed_is_not_kept() -> None:
    kept = {policy: step(policy)[1] for policy in ("none", *POLICIES)}
    batch, heads, length = 3, 2, 10
    assert kept["none"] - kept["attention"] > 4 * batch * heads * length * length  # probabilities of 6 attentions
    assert kept["none"] - kept["feed_forward"] > 4 * batch * length * 32  # inner states of 4 layers
    assert kept["full"] < kept["every_2"] < kept["none"]
    assert kept["every_2"] == pytest.approx((kept["full"] + kept["none"]) / 2, rel=0.05)


def test_every_n_counts_through_the_whole_model() -> None:
    runs: list[int] = []

    def run(number: int) -> None:
        def layer(x: Tensor) -> Tensor:
            runs.append(number)
            return (x * x).sin()

        SeededRunner(1, 1, 0, 3)(number, layer, torch.ones(2, requires_grad=True)).sum().backward()

    for number in range(10):
        run(number)
    again = sorted(number for number in set(runs) if runs.count(number) == 2)
    assert again == [2, 5, 8]  # the first, fourth and seventh layer; 0 and 1 are the embeddings


@pytest.mark.parametrize("policy", ["attention", "feed_forward"])
def test_parts_of_divided_layers_are_recomputed_too(policy: str) -> None:
    """The ranks' messages stay in step in the backward pass. (Dropout of ranks needs processes, not threads.)"""

    def both(axis: Axis) -> tuple[list[Tensor], list[Tensor], bool]:
        expected, kept = step("none", axis, attention_dropout=0.0, dropout=0.0)
        found, fewer = step(policy, axis, attention_dropout=0.0, dropout=0.0)
        return expected, found, fewer < kept

    for expected, found, less in on_ranks(2, both):
        assert less
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right)


def test_without_gradients_everything_runs_once() -> None:
    module = build("attention").eval()
    with torch.no_grad():
        found, expected = module(*micro_batch()), build("none").eval()(*micro_batch())
    assert torch.equal(found[0], expected[0])


def test_values_of_the_key() -> None:
    assert TrainConfig().activation_checkpointing == "none"
    assert recomputation("none") == Recomputation()
    assert recomputation("full") == recomputation("every_1") == Recomputation(layers=1)
    assert recomputation("every_12") == Recomputation(layers=12)
    assert recomputation("feed_forward") == Recomputation(inside="feed_forward")
