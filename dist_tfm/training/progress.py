"""Where a run stands: the counters that a checkpoint keeps beside weights and moments."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from data_pipeline.api import LostBlock, NotNegative, Position, Unreadable
from dist_tfm.errors import RunError


@dataclass(frozen=True)
class Progress:
    """step counts global batches consumed; updates those that changed the weights (skipped ones are the difference).

    best_step, best_value: of the best checkpoint so far by best_metric. lost: blocks that were left out because some
    rank could not read them (data.on_error: skip).
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: NotNegative = 0
    updates: NotNegative = 0
    position: Position = field(default_factory=Position)
    skipped_steps: NotNegative = 0
    skips_in_a_row: NotNegative = 0
    flops: NotNegative = 0
    best_metric: str | None = None
    best_step: int | None = None
    best_value: float | None = None
    lost: tuple[LostBlock, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The content of counters.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Progress":
        """Reads counters.json; raises RunError if it is not what `to_json` wrote."""
        try:
            progress = TypeAdapter(cls).validate_json(json.dumps(record))
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(str(part) for part in fault["loc"])
            raise RunError(f"counters.json of the checkpoint is not this program's ({key}: {fault['msg']})") from None
        position = progress.position
        if min(position.epoch, position.window, position.step) < 0:
            raise RunError(f"counters.json of the checkpoint holds a position that no run can have: {position}")
        return progress

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

    def with_lost(self, blocks: Iterable[Unreadable]) -> "Progress":
        """Notes blocks that are left out from now on, each once."""
        known = {(block.corpus, block.block): block for block in self.lost}
        known |= {(b.corpus, b.block): LostBlock(b.corpus, b.block, b.pairs) for b in blocks}
        return replace(self, lost=tuple(known[key] for key in sorted(known)))

    def with_candidate(self, metric: str, value: float, larger_is_better: bool) -> "Progress":
        """Notes this step, at which a checkpoint is written, as the best one by `metric` if it is.

        A value that is no number never is; values of another metric do not count any more.
        """
        sign = 1 if larger_is_better else -1
        rival = self.best_value if self.best_metric == metric else None
        if not math.isfinite(value) or (rival is not None and sign * value <= sign * rival):
            return self
        return replace(self, best_metric=metric, best_step=self.step, best_value=value)
