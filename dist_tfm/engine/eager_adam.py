"""AdamW for processes that compile no optimizer: torch's own, without the import of its compiler."""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

_ADD_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_STEP = inspect.unwrap(torch.optim.AdamW.step)


class Update(Protocol):
    """How one tensor is updated: what torch.optim.AdamW does for it."""

    def __call__(self, weights: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Changes weights, by the gradient that they carry, and state (`step`, `exp_avg`, `exp_avg_sq`), which is
        there; group: the settings of their parameter group."""
        ...


class EagerAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, number for number; or, with an `update` of its own, but for the rounding of that.

    Torch wraps these two methods so that its compiler leaves them alone, for which it imports the compiler: a thousand
    modules, two seconds of CPU at the start of every process. What is wrapped is all that an optimizer needs which
    nobody compiles.
    """

    def __init__(self, groups: Any, update: Update | None = None, **adam: Any) -> None:
        super().__init__(groups, **adam)
        self.update = update

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        _ADD_GROUP(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See torch.optim.AdamW. An `update` of its own takes no closure, and state that was made before."""
        if self.update is None:
            return _STEP(self, closure)
        if closure is not None:
            raise ValueError("expected no closure: it is taken by torch's own update alone")
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self.update(weights, self.state[weights], group)
        return None
