"""Where metrics go: metrics.jsonl, TensorBoard, and a person's terminal or log."""

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

Record = Mapping[str, Any]
NOT_CURVES = frozenset({"step", "pair_hash", "world_size", "tensor_parallel", "pipeline_parallel", "zero_stage"})


def finite(record: Record) -> dict[str, Any]:
    """The record with null for numbers that JSON does not know (NaN, infinities)."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class MetricsWriter(Protocol):
    """Takes one record (a training or a validation line) at a time."""

    def write(self, record: Record) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class JsonLinesWriter:
    """metrics.jsonl: appended, flushed at once; floats in full precision."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Makes what was written survive a power cut: done before each checkpoint, which lines must not fall behind."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it was met
            self._file.close()


def cut_back(path: Path, step: int) -> None:
    """Cuts metrics.jsonl back in place: from the first line past `step` on, and a broken end that a kill has left.

    What stays is not written again, not even a line in the middle that somebody has broken.
    """
    if not path.exists():
        return
    position = keep = 0
    with path.open("r+b") as file:
        for line in file:
            position += len(line)
            found = _step_of(line)
            if found is None:
                continue
            if found > step:
                break
            keep = position
        file.truncate(keep)
        os.fsync(file.fileno())


def last_step(path: Path) -> int:
    """The largest step of metrics.jsonl, 0 if it holds none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return max((found for line in file if (found := _step_of(line)) is not None), default=0)


def _step_of(line: bytes) -> int | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


class TensorBoardWriter:
    """Event files; what an earlier attempt wrote past the resumed step is purged by TensorBoard.

    Curves are a copy of metrics.jsonl: if they cannot be written (a full disk), training goes on without, and `warn` is
    told once.
    """

    def __init__(self, folder: Path, resumed_step: int, warn: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that only rank 0 needs

        purge = resumed_step + 1 if folder.exists() else None
        self._report = threading.excepthook
        threading.excepthook = self._report_others
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)
        self._warn = warn

    def write(self, record: Record) -> None:
        if self._writer is None:
            return
        group = "valid" if "valid_loss" in record else "train"
        try:
            for key, value in record.items():
                if key not in NOT_CURVES and isinstance(value, int | float) and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{key.removeprefix('valid_')}", value, record["step"])
            self._writer.flush()
        except Exception as fault:  # whatever its background thread has met
            self._give_up(fault)

    def sync(self) -> None:
        """The files are flushed at every record."""

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as fault:
                self._give_up(fault)
        threading.excepthook = self._report

    def _report_others(self, fault: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread tells the next `write` what it has met, and need not print it as well."""
        if not type(fault.thread).__module__.startswith("tensorboard."):
            self._report(fault)

    def _give_up(self, fault: Exception) -> None:
        self._writer = None
        self._warn(f"TensorBoard's files cannot be written ({fault}); training goes on without them")


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
            if "valid_ema_nll" in record:
                shown += [f"nll of the moving average {record['valid_ema_nll']:.4f}"]
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

    def sync(self) -> None:
        """Nothing is kept here."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Writers:
    """All writers of rank 0 as one; no writers at all on the others."""

    def __init__(self, writers: list[MetricsWriter]) -> None:
        self._writers = writers

    def write(self, record: Record) -> None:
        """Hands the record to each writer. Raises OSError."""
        for writer in self._writers:
            writer.write(record)

    def sync(self) -> None:
        """Makes metrics survive a power cut. Raises OSError."""
        for writer in self._writers:
            writer.sync()

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.close()
