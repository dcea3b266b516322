"""Dropout is a function of (seed, step, micro-batch, layer), recomputed or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dist_tfm.config.schema import ModelConfig
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.randomness import SeededRunner, mix, seed_everything_for_layer

torch.set_num_threads(1)
ONES = torch.ones(64)
DROP = nn.Dropout(0.5)
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])


def build(norm: str) -> TranslationLoss:
    config = ModelConfig(
        encoder_layers=2, decoder_layers=2, d_model=16, d_ff=24, heads=2, dropout=0.2, attention_dropout=0.1, norm=norm
    )  # type: ignore[arg-type]
    model = Transformer(config, 30)
    initialize(model, 1)
    return TranslationLoss(model, 0.1)


def micro_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source, target_in, labels = (torch.randint(4, 30, (3, n), generator=generator) for n in (6, 5, 5))
    labels[1, 3:] = 0
    source[2, 4:] = 0
    return source, target_in, labels


def gradients(module: TranslationLoss, runner: Callable[..., Tensor]) -> list[Tensor]:
    module.zero_grad()
    loss, nll = module(*micro_batch(), runner)
    loss.backward()
    return [loss.detach(), nll, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@NORMS
def test_checkpointing_changes_no_bit_with_dropout_on(norm: str) -> None:
    module = build(norm)
    kept = gradients(module, SeededRunner(1, 5, 2, checkpointing=False))
    torch.manual_seed(99)
    recomputed = gradients(module, SeededRunner(1, 5, 2, checkpointing=True))
    assert len(kept) == len(recomputed) == 2 + len(list(module.parameters()))
    for a, b in zip(kept, recomputed, strict=True):
        assert torch.equal(a, b)


@NORMS
def test_recomputation_belongs_to_its_own_micro_batch(norm: str) -> None:
    """Both forward passes run before the backward pass: a seed lives in its own recomputed function."""
    module = build(norm)
    runners = [SeededRunner(1, 5, index, checkpointing=True) for index in (0, 1)]
    apart = [gradients(module, runner) for runner in runners]
    module.zero_grad()
    losses = [module(*micro_batch(), runner)[0] for runner in runners]
    losses[0].backward()
    for parameter, expected in zip(module.parameters(), apart[0][2:], strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected)


def test_checkpointing_runs_layers_twice_and_embeddings_once() -> None:
    calls: list[int] = []

    def counted(number: int) -> Callable[..., Tensor]:
        def layer(x: Tensor) -> Tensor:
            calls.append(number)
            return (x * x).sin()

        return layer

    x = ONES.clone().requires_grad_()
    runner = SeededRunner(1, 1, 0, checkpointing=True)
    for number in (0, 1, 2, 3):
        x = runner(number, counted(number), x)
    x.sum().backward()
    assert sorted(calls) == [0, 1, 2, 2, 3, 3]


def test_checkpointing_keeps_only_the_inputs_of_layers() -> None:
    """Tensors that autograd keeps for the backward pass, in elements."""

    def kept(checkpointing: bool) -> int:
        module, sizes = build("post"), []

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(*micro_batch(), SeededRunner(1, 1, 0, checkpointing))
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


def test_the_same_identity_gives_the_same_dropout_and_any_other_another() -> None:
    def mask(seed: int = 1, step: int = 2, index: int = 3, number: int = 4) -> tuple[float, ...]:
        return tuple(SeededRunner(seed, step, index, checkpointing=False)(number, DROP, ONES).tolist())

    base = mask()
    torch.manual_seed(4)
    assert mask() == base
    others = [mask(seed=2), mask(step=3), mask(index=4), mask(index=-1), mask(number=5), mask(step=3, index=2)]
    assert len({base, *others}) == 1 + len(others)


def test_layers_may_run_in_any_order() -> None:
    runner = SeededRunner(1, 1, 0, checkpointing=False)
    forwards = {number: runner(number, DROP, ONES) for number in (0, 1, 2, 3)}
    backwards = {number: runner(number, DROP, ONES) for number in (3, 2, 1, 0)}
    for number, value in forwards.items():
        assert torch.equal(value, backwards[number])


def test_a_layers_dropout_is_that_of_its_derived_seed() -> None:
    found = SeededRunner(7, 8, 9, checkpointing=False)(10, DROP, ONES)
    torch.manual_seed(mix(7, 8, 9, 10))
    assert torch.equal(found, DROP(ONES)), "the same stream as torch.manual_seed gives"


def test_seeding_takes_all_63_bits() -> None:
    seed_everything_for_layer(2**63 - 1)
    assert torch.default_generator.initial_seed() == 2**63 - 1
