"""bf16 gradients added up in DeepSpeed's flat fp32 buffers: the same sums as its own, with nothing left of older steps.

(That training is exact with them, on any number of ranks, is tests/distributed/test_oracle.py's.)
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_tfm.engine.flat_gradients import FlatGradients
from dist_tfm.errors import RunError

GROUP = object()


def optimizer_of(weights: list[Tensor]) -> Any:
    """What FlatGradients knows of a BF16_Optimizer, in its layout: one group, two elements of padding."""
    flat = torch.full((sum(w.numel() for w in weights) + 2,), 7.0)  # of an earlier step
    flat[-2:] = 0.0
    parts = list(flat[:-2].split([w.numel() for w in weights]))
    return SimpleNamespace(
        bf16_groups=[weights],
        fp32_groups_gradients=[parts],
        fp32_groups_gradients_flat=[flat],
        fp32_groups_has_gradients=[[False] * len(weights)],
        real_dp_process_group=[GROUP],
        _update_hp_grad=None,
        clear_hp_grads=None,
    )


def backward(optimizer: Any, weights: list[Tensor], gradients: list[Tensor | None]) -> None:
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        weight.grad = gradient
        optimizer._update_hp_grad(weight, 0, index, False)


def test_gradients_add_up_in_fp32_and_none_is_left_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[Tensor] = []
    ranks = {GROUP: 1}
    monkeypatch.setattr(dist, "get_world_size", ranks.__getitem__)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(tensor) if group is GROUP else None)
    weights: list[Tensor] = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((2, 3), (4,), (2,))]
    optimizer = optimizer_of(weights)
    flat = optimizer.fp32_groups_gradients_flat[0]
    assert FlatGradients.fits(optimizer)
    gradients = FlatGradients(optimizer)
    one, small = torch.ones(2, 3, dtype=torch.bfloat16), torch.full((4,), 2.0**-9, dtype=torch.bfloat16)
    backward(optimizer, weights, [one, torch.ones_like(small), None])
    backward(optimizer, weights, [one * 2, small, None])
    backward(optimizer, weights, [None, small, None])
    assert all(weight.grad is None for weight in weights)  # the next backward pass adds to nothing
    gradients.reduce()
    assert flat.tolist() == [3.0] * 6 + [1.0 + 2 * 2.0**-9] * 4 + [0.0] * 4  # in bf16 the small ones would be lost
    assert not reduced
    assert weights[0]._hp_grad is optimizer.fp32_groups_gradients[0][0]  # type: ignore[attr-defined]
    optimizer.clear_hp_grads()
    backward(optimizer, weights, [one, None, None])
    ranks[GROUP] = 2
    gradients.reduce()
    assert flat.tolist() == [1.0] * 6 + [0.0] * 8
    assert reduced[0] is flat  # in place
    assert optimizer.fp32_groups_has_gradients == [[True, False, False]]


def test_an_optimizer_of_an_unknown_release_is_refused_before_anything_is_replaced() -> None:
    optimizer = optimizer_of([nn.Parameter(torch.zeros(1))])
    del optimizer._update_hp_grad
    with pytest.raises(RunError, match=r"expected _update_hp_grad in DeepSpeed's BF16_Optimizer, found none"):
        FlatGradients(optimizer)
    assert optimizer.clear_hp_grads is None


def test_other_optimizers_are_left_alone() -> None:
    assert not FlatGradients.fits(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]))
