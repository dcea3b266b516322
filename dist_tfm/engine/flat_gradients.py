"""Where bf16 gradients are added up in fp32 at ZeRO stage 1, without the copies of DeepSpeed that change nothing.

Its BF16_Optimizer keeps the gradients of each parameter group in one flat fp32 tensor. As it comes it fills these with
zeros twice a step, adds the first micro-batch's gradients to the zeros, and copies the flat tensor to another one and
back to sum it over ranks: eight passes over all gradients, which a CPU's memory feels (docs/benchmarks.md). Here the
first micro-batch is copied over what was there, and ranks sum in place, if there is more than one.
The names are those of DeepSpeed 0.19; where one is missing, training does not begin.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_tfm.errors import RunError

_REPLACED = ("_update_hp_grad", "clear_hp_grads")


class FlatGradients:
    """Takes the place of two methods of a BF16_Optimizer. The engine must not reduce gradients: `reduce` does.

    Raises RunError where the optimizer has not these methods: others, unknown here, would add to what is never cleared.
    """

    def __init__(self, optimizer: Any) -> None:
        if missing := [name for name in _REPLACED if not hasattr(optimizer, name)]:
            raise RunError(
                f"bf16 at ZeRO stage 1: expected {' and '.join(missing)} in DeepSpeed's BF16_Optimizer, found none: "
                "install DeepSpeed 0.19.8"
            )
        self._optimizer = optimizer
        optimizer._update_hp_grad = self._add
        optimizer.clear_hp_grads = self._forget

    @staticmethod
    def fits(optimizer: Any) -> bool:
        """Whether DeepSpeed built the optimizer that this is about."""
        return hasattr(optimizer, "bf16_groups")

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums the gradients over replicas, once all micro-batches of a step have gone backward; collective."""
        optimizer = self._optimizer
        for index, flat in enumerate(optimizer.fp32_groups_gradients_flat):
            known = optimizer.fp32_groups_has_gradients[index]
            for gradient, present in zip(optimizer.fp32_groups_gradients[index], known, strict=True):
                if not present:
                    gradient.zero_()  # that of an earlier step
            group = optimizer.real_dp_process_group[index]
            if dist.get_world_size(group) > 1:
                dist.all_reduce(flat, group=group)

    @torch.no_grad()
    def _add(self, weight: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
        """Moves a weight's gradient of this backward pass to those of the step's earlier ones."""
        if weight.grad is None:
            return
        optimizer = self._optimizer
        total, known = optimizer.fp32_groups_gradients[group][index], optimizer.fp32_groups_has_gradients[group]
        if known[index]:
            total.add_(weight.grad.view(-1))
        else:
            total.copy_(weight.grad.view(-1))
        known[index] = True
        weight._hp_grad = total  # type: ignore[attr-defined]
        weight.grad = None

    def _forget(self) -> None:
        optimizer = self._optimizer
        optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]
