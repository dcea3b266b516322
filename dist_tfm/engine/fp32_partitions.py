"""ZeRO stage 1 in fp32 without the copies of DeepSpeed that change nothing.

Its DeepSpeedZeroOptimizer makes one flat tensor of all gradients to sum them over ranks (also where there is one rank),
copies the sums back to the gradients, and flattens those again for Adam; Adam's masters lie beside weights of the same
numbers, which are copied from them after every step; and for the gradient's norm it makes a copy of all gradients in
double precision. Here each gradient is moved, as soon as the backward pass has made it, to where ranks sum them and
Adam reads them, and the weights are their own masters: six passes over memory less, and of 12 P / dp bytes of masters
and moments 8 P / dp are left.
The names are those of DeepSpeed 0.19; where one is missing, training does not begin.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dist_tfm.errors import RunError

_USED = (
    *("reduce_gradients", "averaged_gradients", "bit16_groups", "bit16_groups_flat", "real_dp_process_group"),
    "round_robin_bit16_offsets",  # those of bit16_groups too, whose order is kept: see round_robin_gradients
    *("parallel_partitioned_bit16_groups", "params_in_partition", "single_partition_of_fp32_groups"),
    *("grad_start_offset", "grad_partition_insertion_offset", "get_param_id"),
    *("get_grad_norm_direct", "dp_process_group", "_model_parallel_all_reduce", "gradient_average"),
    "_grad_acc_hooks",  # which its destroy() removes
    "_get_preflattened_grad_partition",  # it looks for flat_partition
)


def _link(parameter: Any, masters: Tensor) -> None:
    """DeepSpeed has kept views of the masters it made: as long as they are there, so is that memory."""
    mapping = parameter._hp_mapping
    if mapping is not None:  # None: no part of it is on this rank
        place = mapping.hp_fragment_address
        mapping.hp_fragment = masters.detach().narrow(0, place.start, place.numel)


class _Gradients(list[Tensor]):
    """The gradients in a rank's partition, parameter by parameter, and the flat tensor that they are views of, which
    DeepSpeed then need not make."""

    def __init__(self, pieces: list[Tensor], flat: Tensor) -> None:
        super().__init__(pieces)
        self.flat_partition = flat


class Fp32Partitions:
    """Takes the place of two methods of a DeepSpeedZeroOptimizer, and of its masters.

    Raises RunError where the optimizer is not as it is known here.
    """

    def __init__(self, optimizer: Any) -> None:
        if missing := [name for name in _USED if not hasattr(optimizer, name)]:
            raise RunError(
                f"fp32 at ZeRO stage 1: expected {', '.join(missing)} in DeepSpeed's DeepSpeedZeroOptimizer, found "
                "none: install DeepSpeed 0.19.8"
            )
        if optimizer.gradient_average:
            raise RunError("fp32 at ZeRO stage 1: expected DeepSpeed to sum gradients over ranks, found their mean")
        self._optimizer = optimizer
        self._flat = [torch.zeros_like(flat) for flat in optimizer.bit16_groups_flat]
        self._gradients = [
            [flat.narrow(0, offset, p.numel()) for offset, p in zip(offsets, group, strict=True)]
            for flat, offsets, group in zip(
                self._flat, optimizer.round_robin_bit16_offsets, optimizer.bit16_groups, strict=True
            )
        ]
        self._known: set[Tensor] = set()  # parameters that have had a gradient since the last step
        for group, sums in zip(optimizer.bit16_groups, self._gradients, strict=True):
            optimizer._grad_acc_hooks += [self._watch(p, total) for p, total in zip(group, sums, strict=True)]
        self._pieces = [self._in_partition(index) for index in range(len(self._flat))]
        for index, masters in enumerate(optimizer.single_partition_of_fp32_groups):
            masters.data = optimizer.parallel_partitioned_bit16_groups[index][self._rank(index)].data
            for parameter in optimizer.bit16_groups[index]:
                _link(parameter, masters)
        optimizer.reduce_gradients = self._reduce
        optimizer.get_grad_norm_direct = self._norm

    @staticmethod
    def fits(optimizer: Any, zero_stage: int) -> bool:
        """Whether DeepSpeed built the optimizer that this is about."""
        return zero_stage == 1 and getattr(optimizer, "dtype", None) == torch.float32

    def _rank(self, index: int) -> int:
        return dist.get_rank(group=self._optimizer.real_dp_process_group[index])

    def _in_partition(self, index: int) -> _Gradients:
        """Where the gradients of this rank's partition of a group are: of its first and last parameter perhaps a
        part."""
        optimizer, rank = self._optimizer, self._rank(index)
        size = optimizer.single_partition_of_fp32_groups[index].numel()
        partition = self._flat[index].narrow(0, rank * size, size)
        starts, places = (
            table[index][rank] for table in (optimizer.grad_start_offset, optimizer.grad_partition_insertion_offset)
        )
        pieces = []
        for parameter in optimizer.params_in_partition[index]:
            number = optimizer.get_param_id(parameter)
            count = min(parameter.numel() - starts[number], size - places[number])
            pieces.append(partition.narrow(0, places[number], count))
        return _Gradients(pieces, partition)

    def _watch(self, parameter: Tensor, sums: Tensor) -> RemovableHandle:
        """Has each backward pass add its gradient of a parameter to sums [elements]."""
        total = sums.view_as(parameter)

        def move(weight: Tensor) -> None:
            if weight.grad is None:
                return
            if weight in self._known:
                total.add_(weight.grad)
            else:
                total.copy_(weight.grad)
                self._known.add(weight)
            weight.grad = None
            weight._hp_grad = total  # type: ignore[attr-defined]  # see fragments.accumulated_gradient

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        return handle

    @torch.no_grad()
    def _reduce(self, pipeline_parallel: bool = False) -> None:
        """Sums the gradients over replicas, once all micro-batches of a step have gone backward; collective."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.bit16_groups):
            for parameter, sums in zip(group, self._gradients[index], strict=True):
                if parameter not in self._known:
                    sums.zero_()  # that of an earlier step
            replicas = optimizer.real_dp_process_group[index]
            if dist.get_world_size(replicas) > 1:
                dist.all_reduce(self._flat[index], group=replicas)
            optimizer.averaged_gradients[index] = self._pieces[index]
        self._known.clear()

    @torch.no_grad()
    def _norm(self, gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients in all partitions of these parameters' group, not finite where one of them is not;
        collective. A parameter counts on the rank that `mark_counted` says."""
        pairs = zip(gradients, parameters, strict=True)
        counted = [g for g, p in pairs if not getattr(p, "ds_pipe_replicated", False)]
        norms = torch.stack(torch._foreach_norm(counted)) if counted else self._flat[0].new_zeros(1)
        # Squared in double precision, where no square of an fp32 norm overflows.
        total = norms.double().square().sum()
        dist.all_reduce(total, group=self._optimizer.dp_process_group)
        self._optimizer._model_parallel_all_reduce(total, dist.ReduceOp.SUM)
        return total.sqrt().float()
