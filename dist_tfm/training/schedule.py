"""The learning rate by optimizer update (Vaswani et al. 2017, section 5.3). It depends on no length of training."""

import math
from collections.abc import Callable

from dist_tfm.config.schema import ScheduleConfig

Rate = Callable[[int], float]
"""Number of an optimizer update, from 1, to its learning rate."""


def rate_function(schedule: ScheduleConfig, d_model: int) -> Rate:
    """The rate function of a configuration.

    noam: factor * d_model^-0.5 * min(u^-0.5, u * warmup^-1.5), the paper's equation 3 for factor 1.
    inverse_sqrt: peak * min(u / warmup, (warmup / u)^0.5). Both rise linearly and peak at update `warmup`.
    The function raises ValueError for an update below 1.
    """
    warmup = schedule.warmup
    peak = schedule.factor / math.sqrt(d_model * warmup) if schedule.kind == "noam" else schedule.peak

    def rate(update: int) -> float:
        if update < 1:
            raise ValueError(f"expected the number of an update, 1 or more, found {update}")
        return peak * min(update / warmup, math.sqrt(warmup / update))

    return rate
