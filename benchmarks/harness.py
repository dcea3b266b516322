"""What every benchmark shares: result rows, where they were measured, paired timing, a table.

A row is {name, value, unit, ratio, peak_fraction, command, machine, commit, date}, null where something does not apply.
ratio: ours divided by this row's value, null on our own rows. peak_fraction: share of the measured GEMM peak of the
same dtype on the same threads. Tokens count EOS, never pads; unit "fraction" is of 1.
"""

import argparse
import dataclasses
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from data_pipeline.errors import InputError
from data_pipeline.files import write_json_atomically

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
MADE_FROM_ROWS = ("benchmarks/results", "docs/benchmarks.md")
"""Recorded rows and their tables: changing these does not change what is measured."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured number; the module's docstring says what the fields mean."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    value: float
    unit: str
    ratio: float | None
    peak_fraction: float | None
    command: str
    machine: str
    commit: str
    date: str


@dataclasses.dataclass
class Recorder:
    """Collects the rows of one command; each is also told to whoever waits, on standard error."""

    command: str
    machine: str
    commit: str
    date: str
    rows: list[Row] = dataclasses.field(default_factory=list)

    def add(
        self, name: str, value: float, unit: str, ratio: float | None = None, peak_fraction: float | None = None
    ) -> None:
        """Adds a row, with six significant digits: more than any timing has."""
        ratio, peak_fraction = (None if x is None else _rounded(x) for x in (ratio, peak_fraction))
        row = Row(name, _rounded(value), unit, ratio, peak_fraction, self.command, self.machine, self.commit, self.date)
        self.rows.append(row)
        say("  " + " | ".join(cells(row)))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def start_recording(script: str, argv: Sequence[str], accelerator: str | None = None) -> Recorder:
    """A recorder for `python benchmarks/SCRIPT ARGV`, here and now. accelerator: the GPU's name, if one is used."""
    return Recorder(
        command=command_line(script, argv),
        machine=describe_machine(accelerator),
        commit=source_commit(),
        date=datetime.now(UTC).date().isoformat(),
    )


def say(line: str) -> None:
    """Progress for a person; results go to standard output."""
    print(line, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """--threads, --quick and --json, which every benchmark takes."""
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="CPU threads of torch (default 1)")
    parser.add_argument("--quick", action="store_true", help="seconds only: shows that it runs, measures nothing well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")


def command_line(script: str, argv: Sequence[str]) -> str:
    """The command that measures the same again; where its rows were written (--json) does not matter."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--json":
            next(arguments, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return shlex.join(["python", f"benchmarks/{script}", *kept])


def describe_machine(accelerator: str | None = None) -> str:
    """Processor, cores that this process may use, version of torch; no names of hosts or people."""
    parts = [_cpu_model(), f"{len(os.sched_getaffinity(0))} cores", f"torch {metadata.version('torch')}"]
    return ", ".join(parts if accelerator is None else [accelerator, *parts])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def source_commit() -> str:
    """The commit of the source tree, with `+` if what is measured was changed since; "none" outside of a checkout."""
    clean = ["--", ".", *(f":(exclude){path}" for path in MADE_FROM_ROWS)]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", *clean)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each contender returns in each round, run in turns: A B A B ... Whatever slows the machine down for a while
    slows down all of them alike, and shows in none of the ratios that `paired_ratio` takes."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            results[name].append(run())
    return results


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median, over rounds, of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def resident_bytes() -> int:
    """Memory of this process that is in use now (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as a JSON list, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, [dataclasses.asdict(row) for row in rows])


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, every key checked. Raises InputError."""
    try:
        return TypeAdapter(list[Row]).validate_json(path.read_bytes())
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its start"
        raise InputError(f"{path}: expected benchmark rows, found a fault at {place}: {first['msg']}") from None
    except OSError as fault:
        raise InputError(f"{path} cannot be read ({fault.strerror}): run the benchmark with --json {path}") from None


def finish(recorder: Recorder, json_file: Path | None) -> int:
    """Prints the table, writes the file if one was asked for; the exit code."""
    print(markdown_table(recorder.rows))
    if json_file is not None:
        write_rows(json_file, recorder.rows)
    return 0


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown: name, value with its unit, ratio, share of the GEMM peak."""
    lines = ["| | value | ours / this | of GEMM peak |", "|---|---:|---:|---:|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def cells(row: Row) -> tuple[str, str, str, str]:
    """A row's cells for people; what does not apply is left empty."""
    ratio = "" if row.ratio is None else significant(row.ratio)
    peak = "" if row.peak_fraction is None else f"{100 * row.peak_fraction:.0f} %"
    return row.name, quantity(row.value, row.unit), ratio, peak


def quantity(value: float, unit: str) -> str:
    """A value with its unit, at a scale that reads well."""
    if unit == "fraction":
        return f"{100 * value:.2f} %"
    scales = {"bytes": (1 << 20, "MiB"), "bytes/s": (10**9, "GB/s"), "FLOP/s": (10**9, "GFLOP/s")}
    divisor, shown = scales.get(unit, (1, unit))
    return f"{significant(value / divisor)} {shown}"


def significant(value: float) -> str:
    """Three significant digits; whole numbers from 100 on, with thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")
