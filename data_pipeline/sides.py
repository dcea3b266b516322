"""The two sides of a corpus, by their configured names: text files (sources.py) or columns of tables (tables.py)."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.errors import InputError
from data_pipeline.sources import TextFacts, measure, read_lines, read_pairs, read_zipped, resolve
from data_pipeline.tables import Column, parse_column, read_columns


def is_streamed(name: str) -> bool:
    """Whether a side comes over a network, every time that it is read. Raises InputError."""
    column = parse_column(name)
    return column is not None and column.table.is_streamed


def read_sides(source: str, target: str, skip: int = 0) -> Iterator[tuple[str, str]]:
    """(source, target) segments, lazily, from pair `skip`. Raises InputError, also when one side ends before the other.

    Two columns of one table are read together.
    """
    one, other = parse_column(source), parse_column(target)
    if one is not None and other is not None and one.table == other.table:
        return ((row[0], row[1]) for row in read_columns(one.table, (one.name, other.name), skip))
    if (one is not None and one.table.is_streamed) or (other is not None and other.table.is_streamed):
        raise InputError(f"{source} and {target}: expected two columns of one table, since it is streamed")
    pairs = read_pairs(resolve(source), resolve(target)) if one is None and other is None else _zip(source, target)
    for _ in zip(range(skip), pairs, strict=False):
        pass
    return pairs


def _zip(source: str, target: str) -> Iterator[tuple[str, str]]:
    return read_zipped((source, read_side(source)), (target, read_side(target)))


def read_side(name: str) -> Iterator[str]:
    """The segments of one side. Raises InputError."""
    column = parse_column(name)
    if column is None:
        return read_lines(resolve(name))
    return _only(column)


def _only(column: Column) -> Iterator[str]:
    return (row[0] for row in read_columns(column.table, (column.name,)))


def measure_side(name: str) -> TextFacts:
    """Checksum and number of segments of a side, having checked its encoding. Raises InputError.

    A streamed side is not read: its checksum is that of its name, which should pin a revision, its number 0.
    """
    column = parse_column(name)
    if column is None:
        return measure(resolve(name))
    if column.table.is_streamed:
        return TextFacts(hashlib.sha256(name.encode()).hexdigest(), 0)
    digest, lines = hashlib.sha256(), 0
    for text in _only(column):
        digest.update(text.encode())
        digest.update(b"\n")
        lines += 1
    if lines == 0:
        raise InputError(f"{name} is empty: expected parallel text, one segment a row")
    return TextFacts(digest.hexdigest(), lines)


def stat_side(name: str) -> tuple[int, int] | None:
    """(size, time of the last change in ns) of a side's files; None if they are not there.

    Of what has no local files of its own (a data set of the hub), whose name alone says whether it changed: (0, 0).
    """
    column = parse_column(name)
    files: list[Path] = [resolve(name)] if column is None else column.table.files
    try:
        stats = [path.stat() for path in files]
    except OSError:
        return None
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
