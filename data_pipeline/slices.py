"""Slices: the corpus divided by a hash of the cleaned source, so that tasks share it out and equal pairs meet in one.

A slice's folder holds parts (parts.py), the keys of the duplicates among them, and slice.json, written last: with it
the slice is complete. Which pairs stay and where they go depends on the text and on data.shuffle_seed alone, so that
any number of slices gives the same shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data_pipeline.clean import CleaningReport, hash_of, normalise
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular, sha256_of, write_bytes_atomically, write_json_atomically
from data_pipeline.parts import Keys, Part

SLICE_FILE = "slice.json"
DROPPED_FILE = "dropped"
DUPLICATES = "duplicates"
PAIRS_COMPARED_AT_ONCE = 1 << 22
"""Hashes and keys that are sorted together when duplicates are looked for: 16 bytes each, three times over."""

_FOLDER = "slice-{number}-of-{count}"


@dataclass(frozen=True)
class Slice:
    """Slice `number` (from 0) of `count`."""

    number: int
    count: int

    def folder(self, work: Path) -> Path:
        """Where its files lie."""
        return work / _FOLDER.format(number=self.number, count=self.count)

    @property
    def chooses(self) -> Callable[[str], bool] | None:
        """Of a raw source, whether its pair belongs to this slice; None: all do."""
        if self.count == 1:
            return None
        return lambda source: hash_of(normalise(source)) % self.count == self.number


def parse_slice(text: str) -> Slice:
    """The slice in "i/n". Raises ValueError."""
    number, separator, count = text.partition("/")
    if not (separator and number.isdecimal() and count.isdecimal() and len(count) < 10 and int(number) < int(count)):
        raise ValueError(f"expected i/n with i from 0 to n - 1, found {text!r}")
    return Slice(int(number), int(count))


def slices_begun(work: Path) -> dict[int, list[Slice]]:
    """Number of slices to those of them that are complete, for every division that was begun."""
    found: dict[int, list[Slice]] = {}
    for folder in sorted(work.glob(_FOLDER.format(number="*", count="*"))):
        _, number, _, count = folder.name.split("-")
        if number.isdecimal() and count.isdecimal():
            complete = found.setdefault(int(count), [])
            if (folder / SLICE_FILE).is_file():
                complete.append(Slice(int(number), int(count)))
    return found


@dataclass(frozen=True)
class SliceContent:
    """The content of slice.json: checksums (sha256) of the files, by name, and what cleaning did."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    tokenizer_checksum: str
    files: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]+$")], str]
    read: int
    kept: int
    rejected: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    @property
    def report(self) -> CleaningReport:
        """What cleaning did with the pairs of the slice, duplicates included."""
        return CleaningReport(self.read, self.kept, dict(self.rejected), dict(self.changed))


def read_slice(folder: Path) -> SliceContent | None:
    """What a slice's folder holds, None if it is not complete. Raises InputError."""
    path = folder / SLICE_FILE
    try:
        return TypeAdapter(SliceContent).validate_json(read_regular(path))
    except FileNotFoundError:
        return None
    except ValidationError as fault:
        raise InputError(
            f"{path} is damaged ({fault.errors()[0]['msg']}): delete {folder}, run its task again"
        ) from None


def seal_slice(folder: Path, parts: Sequence[Path], tokenizer_checksum: str, duplicates: bool) -> SliceContent:
    """Finds the duplicates among the parts (in `folder`) and writes what makes the slice complete. Raises OSError."""
    opened = [Part(path) for path in parts]
    report = CleaningReport()
    for part in opened:
        report.add(part.report)
    files = list(parts)
    if duplicates:
        dropped = duplicate_keys(opened, PAIRS_COMPARED_AT_ONCE)
        report.reject(DUPLICATES, len(dropped))
        report.kept -= len(dropped)
        files.append(folder / DROPPED_FILE)
        write_bytes_atomically(files[-1], dropped.astype("<u8").tobytes())
    checksums = {path.name: sha256_of(path) for path in files}
    content = SliceContent(tokenizer_checksum, checksums, **asdict(report))
    write_json_atomically(folder / SLICE_FILE, asdict(content))
    return content


def duplicate_keys(parts: Sequence[Part], at_once: int) -> Keys:
    """Sorted keys of all pairs whose hash another pair with a lower key has as well.

    Hashes are compared range by range, about `at_once` pairs in memory at a time.
    """
    total = sum(len(part.keys) for part in parts)
    ranges = -(-total // at_once) if total else 0
    found: list[Keys] = []
    for number in range(ranges):
        low, high = (((number + step) << 64) // ranges for step in (0, 1))
        hashes, keys = [], []
        for part in parts:
            own = part.hashes()
            inside = (own >= np.uint64(low)) & (own <= np.uint64(high - 1))
            hashes.append(own[inside])
            keys.append(part.keys[inside])
        all_hashes, all_keys = np.concatenate(hashes), np.concatenate(keys)
        order = np.lexsort((all_keys, all_hashes))
        ordered = all_hashes[order]
        found.append(all_keys[order[1:]][ordered[1:] == ordered[:-1]])
    return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.uint64)


def open_slice(folder: Path, content: SliceContent) -> list[Part]:
    """The parts of a complete slice, without its duplicates, checked against their checksums. Raises InputError."""
    for name, checksum in content.files.items():
        path = folder / name
        try:
            found = sha256_of(path)
        except OSError as fault:
            raise InputError(f"{path} cannot be read ({fault.strerror or fault}): {_again(folder)}") from None
        if found != checksum:
            raise InputError(f"{path} is damaged (its checksum differs from {SLICE_FILE}): {_again(folder)}")
    dropped = np.zeros(0, dtype=np.uint64)
    if DROPPED_FILE in content.files:
        dropped = np.fromfile(folder / DROPPED_FILE, dtype="<u8").astype(np.uint64, copy=False)
    return [Part(folder / name, dropped) for name in content.files if name != DROPPED_FILE]


def _again(folder: Path) -> str:
    _, number, _, count = folder.name.split("-")
    return f"delete {folder} and run prepare.py --task {number}/{count} again"


def complete_division(work: Path) -> list[Slice]:
    """All slices of the division of which every one is complete. Raises InputError that says which are missing."""
    begun = slices_begun(work)
    for count, complete in begun.items():
        if len(complete) == count:
            return sorted(complete, key=lambda piece: piece.number)
    if not begun:
        raise InputError(f"no task has begun in {work}: run prepare.py --task i/n for every i from 0 to n - 1 first")
    count, complete = max(begun.items(), key=lambda item: len(item[1]) / item[0])
    missing = sorted(set(range(count)) - {piece.number for piece in complete})
    named = ", ".join(f"{number}/{count}" for number in missing[:5]) + (", ..." if len(missing) > 5 else "")
    raise InputError(f"{len(missing)} of {count} tasks have not ended in {work}: run prepare.py --task {named} first")
