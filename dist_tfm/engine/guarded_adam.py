"""The optimizer of ZeRO stage 0: AdamW that measures, clips and guards, as DeepSpeed does itself at stages 1 to 3."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dist_tfm.engine.eager_adam import EagerAdamW


class GuardedAdam(EagerAdamW):
    """AdamW that computes the global gradient norm, clips by it, and skips the update if it is not finite.

    A plain optimizer at stage 0 would apply NaN, and its norm would not be known. DeepSpeed's engine reads
    `_global_grad_norm` (before clipping; inf on a skipped step) and `overflow` (the step was skipped) after `step()`.
    All ranks get the same norm, so all of them decide alike.

    clip_norm: bound of the global norm, 0 for none. counts: whether a parameter counts in this rank's part of the norm;
    total: sums squared norms over the ranks that hold other parts of the model.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        clip_norm: float,
        counts: Callable[[Tensor], bool] = lambda parameter: True,
        total: Callable[[Tensor], Tensor] = lambda squares: squares,
        **adam: Any,
    ) -> None:
        super().__init__(groups, **adam)
        self.clip_norm = clip_norm
        self._counts, self._total = counts, total
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One guarded update. closure: not supported, as in DeepSpeed's optimizers."""
        if closure is not None:
            raise ValueError("GuardedAdam takes no closure")
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients: list[Tensor] = [p.grad for p in parameters]
        counted = [p.grad for p in parameters if self._counts(p)]
        # Squared in double precision, where no square of an fp32 norm overflows.
        squares = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted))).double().square()
        norm = math.sqrt(float(self._total(squares)))
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if self.overflow:
            return
        if 0 < self.clip_norm < norm:
            torch._foreach_mul_(gradients, self.clip_norm / (norm + 1e-6))
        super().step()
