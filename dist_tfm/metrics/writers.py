"""Where metrics go: metrics.jsonl, TensorBoard, and a person's terminal or log."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

Record = Mapping[str, Any]
NOT_CURVES = frozenset({"step", "pair_hash", "world_size", "zero_stage"})


def finite(record: Record) -> dict[str, Any]:
    """The record with null for numbers that JSON does not know (NaN, infinities)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class MetricsWriter(Protocol):
    """Takes one record (a training or a validation line) at a time."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """metrics.jsonl: appended, flushed at once; floats in full precision."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Cuts metrics.jsonl back in place to its lines up to and including `step`.

    A line broken by a kill is cut off too. What stays is not written again.
    """
    if not path.exists():
        return
    keep = 0
    with path.open("r+b") as file:
        for line in file:
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                record = None
            if not isinstance(record, dict) or record.get("step", step + 1) > step:
                break
            keep += len(line)
        file.truncate(keep)
        os.fsync(file.fileno())


class TensorBoardWriter:
    """Event files; what an earlier attempt wrote past the resumed step is purged by TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that only rank 0 needs

        purge = resumed_step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, record: Record) -> None:
        group = "valid" if "valid_loss" in record else "train"
        for key, value in record.items():
            if key not in NOT_CURVES and isinstance(value, int | float) and math.isfinite(value):
                name = f"{group}/{key.removeprefix('valid_')}"
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Console:
    """Progress for a person: a bar on a terminal, plain lines in a log. Silent on all ranks but the first."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._bar: Any = None

    def start(self, step: int, steps: int) -> None:
        """Shows a bar from `step` to `steps` where standard error is a terminal."""
        if self._enabled and sys.stderr.isatty():
            self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        """One step was made."""
        if self._bar is not None:
            self._bar.update(1)

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if self._enabled:
            if self._bar is not None:
                self._bar.write(text)
            else:
                print(text, flush=True)

    def write(self, record: Record) -> None:
        """A training or validation line, shortened."""
        if "valid_loss" in record:
            shown = [f"valid loss {record['valid_loss']:.4f}", f"nll {record['valid_nll']:.4f}"]
            shown += [f"ppl {record['valid_ppl']:.2f}"]
            if record.get("valid_bleu") is not None:
                shown += [f"BLEU {record['valid_bleu']:.2f} ({record['valid_decoded']} sentences, greedy)"]
            self.say(f"step {record['step']}: {', '.join(shown)}")
        elif self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {record['loss']:.3f} {record['tokens_per_second']:.0f} tok/s", refresh=False
            )
        else:
            self.say(
                f"step {record['step']} epoch {record['epoch']}: loss {record['loss']:.4f} ppl {record['ppl']:.2f} "
                f"lr {record['lr']:.3g} grad_norm {record['grad_norm']:.3f} {record['tokens_per_second']:.0f} tokens/s"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Writers:
    """All writers of rank 0 as one; no writers at all on the others."""

    def __init__(self, writers: list[MetricsWriter]) -> None:
        self._writers = writers

    def write(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()
