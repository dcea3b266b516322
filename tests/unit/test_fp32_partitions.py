"""fp32 at ZeRO stage 1: gradients summed where Adam reads them, weights that are their own masters.

(That training is exact with them, on any number of ranks, is tests/distributed/test_oracle.py's.)
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_tfm.engine.fp32_partitions import Fp32Partitions
from dist_tfm.errors import RunError

GROUP = object()
SHAPES = ((2, 3), (4,), (1, 3))
"""13 elements; with three of padding, two ranks have eight each, and the second parameter belongs to both."""


def optimizer_of(rank: int) -> tuple[Any, list[nn.Parameter], Tensor]:
    """What Fp32Partitions knows of a DeepSpeedZeroOptimizer, on one of two ranks; its weights, as views of the flat
    tensor that comes last."""
    flat = torch.zeros(16)
    flat[:13] = torch.arange(13.0)
    views = [part.view(shape) for part, shape in zip(flat[:13].split([6, 4, 3]), SHAPES, strict=True)]
    weights = [nn.Parameter(view) for view in views]
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    here = [weights[:2], weights[1:]][rank]
    masters = flat[8 * rank : 8 * rank + 8].clone()
    for weight, place in zip(weights, [((0, 6), (6, 2), None), (None, (0, 2), (2, 3))][rank], strict=True):
        address = None if place is None else SimpleNamespace(start=place[0], numel=place[1])
        weight._hp_mapping = address and SimpleNamespace(  # type: ignore[attr-defined]
            hp_fragment_address=address, hp_fragment=masters.narrow(0, address.start, address.numel)
        )
    optimizer = SimpleNamespace(
        dtype=torch.float32,
        reduce_gradients=None,
        get_grad_norm_direct=None,
        _grad_acc_hooks=[],
        gradient_average=False,
        _get_preflattened_grad_partition=None,
        dp_process_group=GROUP,
        _model_parallel_all_reduce=lambda total, op: total.mul_(4),  # as if three others had the same
        averaged_gradients={},
        bit16_groups=[weights],
        bit16_groups_flat=[flat],
        round_robin_bit16_offsets=[[0, 6, 10]],
        real_dp_process_group=[GROUP],
        parallel_partitioned_bit16_groups=[list(flat.split(8))],
        params_in_partition=[here],
        single_partition_of_fp32_groups=[masters],
        grad_start_offset=[[{0: 0, 1: 0}, {1: 2, 2: 0}]],
        grad_partition_insertion_offset=[[{0: 0, 1: 6}, {1: 0, 2: 2}]],
        get_param_id=lambda parameter: numbers[id(parameter)],
    )
    return optimizer, weights, flat


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_are_summed_in_place_and_cut_where_the_partitions_are(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[tuple[Tensor, Any]] = []

    def all_reduce(tensor: Tensor, group: Any) -> None:
        reduced.append((tensor, group))
        tensor.mul_(2)  # as if the other rank had the same ones

    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", {GROUP: 2}.__getitem__)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    optimizer, weights, _ = optimizer_of(rank)
    Fp32Partitions(optimizer)
    # Two micro-batches; not contiguous where it can be.
    for gradient in ([(w.detach() + 1) / 4 for w in weights], [(w.detach() + 1) * 0.75 for w in weights]):
        torch.autograd.backward(weights, [g.t().contiguous().t() if g.dim() > 1 else g for g in gradient])
        assert all(weight.grad is None for weight in weights)  # moved: no gradient is held twice
    assert weights[1]._hp_grad.tolist() == [7.0, 8.0, 9.0, 10.0]  # type: ignore[attr-defined]
    optimizer.reduce_gradients(pipeline_parallel=False)
    whole = torch.tensor([2.0 * (i + 1) for i in range(13)] + [0.0] * 3)
    gradients = optimizer.averaged_gradients[0]
    assert torch.equal(gradients.flat_partition, whole[8 * rank : 8 * rank + 8])
    pieces = [whole[:6], whole[6:8]] if rank == 0 else [whole[8:10], whole[10:13]]
    assert [piece.tolist() for piece in gradients] == [piece.tolist() for piece in pieces]
    assert [group for _, group in reduced] == [GROUP]
    torch.autograd.backward([weights[0]], [torch.ones(2, 3)])
    optimizer.reduce_gradients()
    assert optimizer.averaged_gradients[0] is gradients
    assert reduced[0][0] is reduced[1][0]
    left = torch.tensor([2.0] * 6 + [0.0] * 10)  # nothing of the step before
    assert torch.equal(gradients.flat_partition, left[8 * rank : 8 * rank + 8])


def test_one_rank_sums_nothing_and_masters_are_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.delattr(dist, "all_reduce")
    optimizer, weights, flat = optimizer_of(0)
    masters = optimizer.single_partition_of_fp32_groups[0]
    Fp32Partitions(optimizer)
    assert optimizer.single_partition_of_fp32_groups[0] is masters  # Adam holds this very tensor
    torch.autograd.backward([weights[0]], [torch.full((2, 3), 5.0)])
    optimizer.reduce_gradients()
    assert optimizer.averaged_gradients[0].flat_partition.tolist() == [5.0] * 6 + [0.0] * 2
    for weight in weights[:2]:  # no view of the masters that DeepSpeed made, which would keep them
        fragment = weight._hp_mapping.hp_fragment  # type: ignore[attr-defined]
        assert torch.equal(fragment, weight.detach().view(-1)[: len(fragment)])
        assert fragment.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    torch.autograd.backward([weights[0]], [torch.ones(2, 3)])
    assert weights[0].grad is not None  # nothing of it is left in the weights
    masters.fill_(7.0)
    assert flat.tolist()[:8] == [7.0] * 8
    assert weights[0].tolist() == [[7.0] * 3] * 2


def test_the_norm_is_of_what_counts_and_tells_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.mul_(9))
    optimizer, weights, _ = optimizer_of(0)
    Fp32Partitions(optimizer)
    gradients = [torch.full((6,), 3.0), torch.tensor([3e18, -3e18])]
    norm = optimizer.get_grad_norm_direct(gradients, weights[:2])
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    assert float(norm) == pytest.approx(6 * 2**0.5 * 3e18)  # whose square no float32 holds
    weights[1].ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert float(optimizer.get_grad_norm_direct(gradients, weights[:2])) == pytest.approx(6 * 54**0.5)
    weights[0].ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert float(optimizer.get_grad_norm_direct(gradients, weights[:2])) == 0.0
    for value in (float("nan"), float("inf")):
        found = optimizer.get_grad_norm_direct([torch.tensor([1.0, value])], weights[2:])
        assert not torch.isfinite(found)


def test_an_optimizer_of_an_unknown_release_is_refused_before_anything_is_replaced() -> None:
    optimizer, _, _ = optimizer_of(0)
    del optimizer.grad_start_offset
    masters = optimizer.single_partition_of_fp32_groups[0]
    with pytest.raises(RunError, match=r"expected grad_start_offset in DeepSpeed's DeepSpeedZeroOptimizer, found none"):
        Fp32Partitions(optimizer)
    assert optimizer.reduce_gradients is None
    assert masters.data_ptr() != optimizer.bit16_groups_flat[0].data_ptr()


def test_a_mean_over_ranks_is_refused() -> None:
    optimizer, _, _ = optimizer_of(0)
    optimizer.gradient_average = True
    with pytest.raises(RunError, match="expected DeepSpeed to sum gradients over ranks"):
        Fp32Partitions(optimizer)


def test_other_optimizers_and_stages_are_left_alone() -> None:
    optimizer, weights, _ = optimizer_of(0)
    assert Fp32Partitions.fits(optimizer, 1)
    assert not Fp32Partitions.fits(optimizer, 2)
    optimizer.dtype = torch.float16
    assert not Fp32Partitions.fits(optimizer, 1)
    assert not Fp32Partitions.fits(torch.optim.AdamW(weights), 1)
