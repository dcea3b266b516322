"""AdamW for processes that compile no optimizer: torch's own, without the import of its compiler."""

import inspect
from typing import Any

import torch

_ADD_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_STEP = inspect.unwrap(torch.optim.AdamW.step)


class EagerAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, number for number.

    Torch wraps these two methods so that its compiler leaves them alone, for which it imports the compiler: a thousand
    modules, two seconds of CPU at the start of every process. What is wrapped is all that an optimizer needs which
    nobody compiles.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        _ADD_GROUP(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See torch.optim.AdamW."""
        return _STEP(self, closure)
