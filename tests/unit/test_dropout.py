"""Dropout on a CPU: kept as often as it says, independently, scaled so that the mean stays, decided by torch's seed."""

import math

import pytest
import torch
from torch import Tensor

from dist_tfm.model.dropout import LEVELS, Dropout

COUNT = 400_000


def dropped_out(p: float, x: Tensor, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return Dropout(p).train()(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_it_keeps_as_often_as_it_says_and_the_mean(p: float, dtype: torch.dtype) -> None:
    kept = dropped_out(p, torch.ones(COUNT, dtype=dtype)) != 0
    spread = math.sqrt(p * (1 - p) / COUNT)
    assert abs(kept.double().mean() - (1 - p)) < 4 * spread + 1 / LEVELS
    for quarter in range(4):  # of the number that four neighbours share
        assert abs(kept[quarter::4].double().mean() - (1 - p)) < 8 * spread + 1 / LEVELS
    values = dropped_out(p, torch.ones(COUNT, dtype=dtype)).unique()
    assert values.tolist() == [0, pytest.approx(1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3)]


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 512])
def test_elements_are_dropped_independently(distance: int) -> None:
    kept = (dropped_out(0.3, torch.ones(COUNT)) != 0).double() - 0.7
    correlation = float((kept[distance:] * kept[:-distance]).mean() / (0.3 * 0.7))
    assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_the_seed_decides_and_the_gradient_has_the_same_mask() -> None:
    x = torch.randn(3, 5, 7, requires_grad=True)
    output = dropped_out(0.4, x, seed=3)
    assert torch.equal(output, dropped_out(0.4, x, seed=3))
    assert not torch.equal(output, dropped_out(0.4, x, seed=4))
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * x, output)
    assert 0 < int((x.grad == 0).sum()) < x.numel()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7])
def test_any_number_of_elements(count: int) -> None:
    assert dropped_out(0.5, torch.ones(count)).shape == (count,)


def test_layout_of_the_input_does_not_matter() -> None:
    x = torch.randn(6, 8)
    assert torch.equal(dropped_out(0.5, x.t().contiguous().t()), dropped_out(0.5, x))


def test_nothing_is_dropped_in_evaluation_and_everything_at_1() -> None:
    x = torch.randn(20)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(dropped_out(0.0, x), x)
    assert torch.equal(dropped_out(1.0, x), torch.zeros(20))
