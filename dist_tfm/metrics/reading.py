"""Reads back what a run has written about itself."""

import json
import math
from pathlib import Path

from dist_tfm.errors import InputError


def metric_values(metrics: Path, key: str) -> dict[int, float]:
    """Step to value of `key` in those lines of a metrics.jsonl that have it: loss in training lines, valid_nll and
    valid_bleu in validation lines.

    A last line that a kill broke is left out, as are values that are no finite number. Raises InputError if the file is
    missing or one of its other lines is no record.
    """
    try:
        text = metrics.read_text(encoding="utf-8")
    except OSError as fault:
        raise InputError(f"{metrics} cannot be read ({fault.strerror}): expected the metrics of a run") from None
    values: dict[int, float] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise InputError(f"{metrics}, line {number}: expected a record, found {line[:40]!r}") from None
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            values[int(record["step"])] = float(value)
    return values
