"""Columns of tables as sides of a corpus: TSV, and through Hugging Face `datasets` CSV, JSONL, Parquet and the hub.

    tsv:FILE#2                              second column of tab-separated text, plain or .gz, .xz, .zst
    csv:FILE#de  jsonl:FILE#a.de            a column by its name, a.de being field de of column a; FILE may be a
    parquet:FILES#a.de                      pattern (data/*.parquet) or a URL
    hub:NAME:CONFIG:SPLIT#translation.de    a data set of the hub, downloaded into its cache; NAME@REVISION pins it
    stream:NAME:CONFIG:SPLIT#translation.de the same, streamed: for what is too large to download first

CONFIG may be left out (NAME:SPLIT); NAME may be a folder. What `tsv:`, `csv:`, `jsonl:` and `parquet:` name by a URL is
streamed too. Nothing that comes with a data set is ever run: one that needs code of its own is refused.
"""

import csv
import glob
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import InputError, shorten
from data_pipeline.sources import read_lines

_ROWS_AT_ONCE = 4096
_MOST_COLUMNS = 1000
_PLAIN_FORMATS = ("parquet", "arrow", "json", "csv", "text")
"""Formats that `datasets` reads as plain tables."""
_FILES, _HUB = ("tsv", "csv", "jsonl", "parquet"), ("hub", "stream")
_NAME = re.compile(rf"({'|'.join((*_FILES, *_HUB))}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Where rows are: what stands before the column's name."""

    kind: str
    location: str

    @property
    def is_streamed(self) -> bool:
        """Whether its rows come over a network, every time that they are read."""
        return self.kind == "stream" or (self.kind in _FILES and "://" in self.location)

    @property
    def is_on_the_hub(self) -> bool:
        """Whether it is a data set of the hub, not a folder that is named like one."""
        return self.kind in _HUB and not Path(self.location.partition(":")[0]).is_dir()

    @property
    def files(self) -> list[Path]:
        """The local files that it consists of; none if it is no table of local files. Raises InputError."""
        if self.kind not in _FILES or self.is_streamed:
            return []
        found = sorted(glob.glob(self.location)) if glob.has_magic(self.location) else [self.location]
        if not found:
            raise InputError(f"{self}: no file matches")
        return [Path(name) for name in found]

    def __str__(self) -> str:
        return f"{self.kind}:{self.location}"


@dataclass(frozen=True)
class Column:
    """One column of a table: a side of a corpus."""

    table: Table
    name: str


def parse_column(name: str) -> Column | None:
    """The column that a configured name stands for; None if it names a text file. Raises InputError."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, rest = match.groups()
    location, separator, column = rest.rpartition("#")
    if not (separator and location and column):
        raise InputError(f"{shorten(name)}: expected {_shape(kind)}")
    if kind in _HUB and not 2 <= len(location.split(":")) <= 3:
        raise InputError(f"{shorten(name)}: expected {_shape(kind)}, or without CONFIG")
    if kind == "tsv" and not (column.isdecimal() and 0 < int(column[:9]) <= _MOST_COLUMNS):
        raise InputError(f"{shorten(name)}: expected the number of a column, from 1, after #")
    return Column(Table(kind, location), column)


def _shape(kind: str) -> str:
    return f"{kind}:NAME:CONFIG:SPLIT#COLUMN" if kind in _HUB else f"{kind}:FILE#COLUMN"


def read_columns(table: Table, columns: Sequence[str], skip: int = 0) -> Iterator[tuple[str, ...]]:
    """Rows of a table, as the text in these columns, from row `skip`; what is missing is blank, line ends are spaces.

    Raises InputError.
    """
    if table.kind == "tsv" and not table.is_streamed:
        rows = itertools.chain.from_iterable(_read_tsv(path, columns) for path in table.files)
        return itertools.islice(rows, skip, None)
    return _read_data_set(table, columns, skip)


def _read_tsv(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    places = [int(column) - 1 for column in columns]
    needed = max(places) + 1
    for number, line in enumerate(read_lines(path), start=1):
        fields = line.split("\t")
        if len(fields) < needed:
            raise InputError(
                f"{path}, line {number}: expected {needed} columns at least, separated by tabs, found {len(fields)}"
            )
        yield tuple(fields[place] for place in places)


def _read_data_set(table: Table, columns: Sequence[str], skip: int) -> Iterator[tuple[str, ...]]:
    # Imported here: it takes a second or two, and those who read text files have no need of it.
    import pyarrow

    try:
        rows = _open(table)
        if skip:
            rows = rows.skip(skip)
        for batch in rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            yield from zip(*(_texts(table, batch, column) for column in columns), strict=True)
    except InputError:
        raise
    except (
        RuntimeError,
        ValueError,
        KeyError,
        OSError,
        EOFError,
        ImportError,
        csv.Error,
        pyarrow.ArrowException,
    ) as fault:
        raise _explain(table, fault) from None


def _open(table: Table) -> Any:
    import datasets

    # What goes wrong is said once, by us.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if table.kind in _HUB:
        return _open_hub(table)
    builder = {"tsv": "csv", "jsonl": "json"}.get(table.kind, table.kind)
    options: dict[str, Any] = {}
    if table.kind in ("tsv", "csv"):
        # Every field is text as it stands: "NA" is no gap, 007 no number.
        as_text = dict.fromkeys(range(_MOST_COLUMNS), str)
        options = {"converters": as_text, "keep_default_na": False, "na_filter": False, "encoding": "utf-8"}
    if table.kind == "tsv":
        options |= {"sep": "\t", "quoting": csv.QUOTE_NONE, "header": None, "lineterminator": "\n"}
        options["skip_blank_lines"] = False
    files = [str(path) for path in table.files] or [table.location]
    for path in table.files:
        if not path.is_file():
            raise InputError(f"{table}: {path} not found")
    # Streamed even from the disk: nothing is copied into a cache.
    return datasets.load_dataset(builder, data_files={"train": files}, split="train", streaming=True, **options)


def _open_hub(table: Table) -> Any:
    import datasets

    name, *config, split = table.location.split(":")
    name, _, revision = name.partition("@")
    builder = datasets.load_dataset_builder(name, *config, revision=revision or None)
    if builder.name not in _PLAIN_FORMATS:
        raise InputError(
            f"{table} is stored as {builder.name}: expected {', '.join(_PLAIN_FORMATS[:-1])} or {_PLAIN_FORMATS[-1]}, "
            "whose text can be read without trusting it"
        )
    if table.kind == "stream":
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    # Iterable, so that rows come in the batches that streaming gives.
    return builder.as_dataset(split=split).to_iterable_dataset()


def _texts(table: Table, batch: Any, column: str) -> list[str]:
    """One column of some rows."""
    import pyarrow
    import pyarrow.compute

    known = batch.column_names
    first, *fields = [str(int(column) - 1)] if table.kind == "tsv" else _path(column, known)
    if first not in known:
        raise InputError(f"{table} has no column {shorten(column)}: expected one of {shorten(', '.join(known))}")
    values = batch.column(first)
    for field in fields:
        kind = values.type
        names = [kind.field(i).name for i in range(kind.num_fields)] if pyarrow.types.is_struct(kind) else []
        if field not in names:
            there = f"expected one of {shorten(', '.join(names))}" if names else f"it holds {shorten(str(kind))}"
            raise InputError(f"{table}: column {first} has no field {shorten(field)}: {there}")
        values = pyarrow.compute.struct_field(values, field)
    if not (pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type)):
        raise InputError(f"{table}: expected text in column {shorten(column)}, found {shorten(str(values.type))}")
    texts: list[str | None] = values.to_pylist()
    return [text.replace("\n", " ") if text else "" for text in texts]


def _path(column: str, known: Sequence[str]) -> list[str]:
    return [column] if column in known else column.split(".")


def _explain(table: Table, fault: Exception) -> InputError:
    reason: BaseException = fault
    while reason.__cause__ is not None:
        reason = reason.__cause__
    said = shorten(" ".join(str(fault).split()))
    if "scripts are no longer supported" in str(fault) or "trust_remote_code" in str(fault):
        return InputError(
            f"{table} needs code of its own to be read ({said}), which is never run: use a copy as Parquet, for "
            "example the one that the hub keeps (NAME@refs/convert/parquet)"
        )
    names = {kind.__name__ for error in (fault, reason) for kind in type(error).__mro__}
    if names & {"ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "HTTPError", "TimeoutError"}:
        return InputError(
            f"{table} is not in the cache and cannot be fetched ({said}): go online, or set HF_HOME to a cache that "
            "holds it"
        )
    if isinstance(reason, UnicodeError):
        return InputError(f"{table}: expected UTF-8, found something else ({shorten(str(reason))})")
    if "://" in table.location and isinstance(reason, FileNotFoundError):
        return InputError(f"{table} is not there or cannot be reached ({said}): check its address, or go online")
    detail = shorten(" ".join(f"{type(reason).__name__}: {reason}".split()))
    return InputError(f"{table} cannot be read ({detail}): check its name, configuration and split, or restore it")
