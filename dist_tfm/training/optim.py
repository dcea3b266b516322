"""Which parameters decay: the optimizer's groups (Adam itself, section 5.3 of the paper, is built by the engine)."""

from typing import Any

from torch import nn

from dist_tfm.config.schema import OptimConfig


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Two groups, told apart by `name`: matrices ("decay") take `weight_decay`, vectors ("no_decay") none.

    The split does not depend on weight_decay, so that a run may be compared with another decay group by group. An empty
    group is left out: DeepSpeed reduces the gradient norm group by group, and an empty one would break it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"name": "decay", "params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"name": "no_decay", "params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
