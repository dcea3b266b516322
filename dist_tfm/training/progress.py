"""Where a run stands: the counters that a checkpoint keeps beside weights and moments."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from data_pipeline.api import Position
from dist_tfm.errors import RunError


@dataclass(frozen=True)
class Progress:
    """step counts global batches consumed; updates those that changed the weights (skipped ones are the difference)."""

    step: int = 0
    updates: int = 0
    position: Position = field(default_factory=Position)
    skipped_steps: int = 0
    skips_in_a_row: int = 0
    flops: int = 0
    best_step: int | None = None
    best_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of counters.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Progress":
        """Reads counters.json; raises RunError if it is not what `to_json` wrote."""
        try:
            return cls(**{**record, "position": Position(**record["position"])})
        except (KeyError, TypeError) as fault:
            raise RunError(f"counters.json of the checkpoint does not fit this version: {fault}") from None

    def after_step(self, position: Position, applied: bool, flops: int) -> "Progress":
        """One global batch later."""
        return replace(
            self,
            step=self.step + 1,
            updates=self.updates + int(applied),
            position=position,
            skipped_steps=self.skipped_steps + int(not applied),
            skips_in_a_row=0 if applied else self.skips_in_a_row + 1,
            flops=flops,
        )

    def with_validation(self, value: float, larger_is_better: bool) -> "Progress":
        """Notes the value of checkpoint.best_metric at this step, if it is a number and the best so far."""
        sign = 1 if larger_is_better else -1
        if not math.isfinite(value) or (self.best_value is not None and sign * value <= sign * self.best_value):
            return self
        return replace(self, best_step=self.step, best_value=value)
