"""Adam by a compiled kernel (train.kernels: native), which writes the bf16 weights of the forward pass on the way."""

from typing import Any

from torch import Tensor

from dist_tfm.errors import RunError
from dist_tfm.kernels.native import AdamRule, Kernels

_USED = ("fp32_groups_flat_partition", "bf16_partitioned_groups", "update_lp_params")


class NativeUpdate:
    """The `dist_tfm.engine.eager_adam.Update` of the compiled kernel, for contiguous tensors in fp32 on a CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._copies: dict[Tensor, Tensor] = {}
        self._written: set[Tensor] = set()

    def keep_copy(self, weights: Tensor, copies: Tensor) -> None:
        """From now on every update of `weights` also sets `copies`, bf16 of as many elements, to what they are then."""
        self._copies[weights] = copies

    def take_written(self) -> set[Tensor]:
        """The weights whose copies were set since this was last asked."""
        written, self._written = self._written, set()
        return written

    def __call__(self, weights: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """See `Update`. Raises ValueError for tensors that the kernel cannot take."""
        gradients = weights.grad
        if gradients is None:
            raise ValueError(f"expected a gradient of {list(weights.shape)}, found none")
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rule = AdamRule(group["lr"], group["weight_decay"], beta1, beta2, group["eps"], int(state["step"]))
        moments = state["exp_avg"], state["exp_avg_sq"]
        copies = self._copies.get(weights)
        self._kernels.adam_(weights, gradients.contiguous(), *moments, rule, copies)
        if copies is not None:
            self._written.add(weights)


class UpdatedCopies:
    """Takes the place of the pass in which a BF16_Optimizer, after Adam's step, makes bf16 weights of its masters.

    That pass is left out after a step, whose update has made them; asked for otherwise, as when a checkpoint was read
    into the masters, it is what it was. For ranks that hold all weights: others have to gather them anyway.
    """

    def __init__(self, optimizer: Any, update: NativeUpdate) -> None:
        """optimizer: DeepSpeed's, whose Adam updates by `update`. Raises RunError where it is not as known here."""
        if missing := [name for name in _USED if not hasattr(optimizer, name)]:
            raise RunError(
                f"bf16 at ZeRO stage 1: expected {', '.join(missing)} in DeepSpeed's BF16_Optimizer, found none: "
                "install DeepSpeed 0.19.8"
            )
        self._masters = set(optimizer.fp32_groups_flat_partition)
        for masters, (copies,) in zip(
            optimizer.fp32_groups_flat_partition, optimizer.bf16_partitioned_groups, strict=True
        ):
            update.keep_copy(masters, copies)
        self._update = update
        self._copy_all = optimizer.update_lp_params
        optimizer.update_lp_params = self._copy

    @staticmethod
    def fits(optimizer: Any, ranks: int) -> bool:
        """Whether DeepSpeed built the optimizer that this is about, for one rank that holds everything."""
        return ranks == 1 and hasattr(optimizer, "bf16_groups")

    def _copy(self) -> None:
        if self._update.take_written() != self._masters:
            self._copy_all()
