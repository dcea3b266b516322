"""State by canonical name and full shape, in safetensors files that any layout writes and any other layout reads.

Each rank writes one file with only what it owns: one-dimensional fp32 tensors named KIND/NAME (fp32/encoder... for the
master weight, exp_avg/..., exp_avg_sq/..., ema/...), each a flat range of a parameter. The index says which range
that is, and a reader takes from the files only the ranges that its own layout needs.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dist_tfm.checkpoint.files import FileRecord, write_file
from dist_tfm.checkpoint.layout import FORMAT
from dist_tfm.engine.base import Fragment
from dist_tfm.errors import InputError
from dist_tfm.parallel.collectives import Json
from dist_tfm.parallel.tags import Tag


@dataclass(frozen=True)
class Part:
    """A stored flat range [start, start + numel) of rows [low, high) along the entry's dimension."""

    file: str
    low: int
    high: int
    start: int
    numel: int


@dataclass(frozen=True)
class Entry:
    """A parameter in the index: full shape, the dimension along which writers had cut it, and its parts."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Part, ...]


Index = dict[str, Entry]


def write_state(path: Path, fragments: Sequence[Fragment]) -> FileRecord:
    """Writes the fragments that are this rank's to write (tag.writer) as one safetensors file, one tensor at a time.

    Raises OSError, and ValueError where two fragments would have the same key.
    """
    views = [
        (f"{kind}/{fragment.tag.name}", view)
        for fragment in fragments
        if fragment.tag.writer
        for kind, view in fragment.views.items()
    ]
    for key, view in views:
        if view.dtype != torch.float32:
            raise ValueError(f"{key}: expected fp32 state, found {view.dtype}")
    return write_tensors(path, [(key, view.numel()) for key, view in views], (view for _, view in views))


def write_tensors(path: Path, keys: Sequence[tuple[str, int]], tensors: Iterable[Tensor]) -> FileRecord:
    """Writes one-dimensional fp32 tensors as a safetensors file. Each is asked for when it is written, then let go.

    keys: name and number of elements of each; tensors: the same many, in the same order. Raises OSError, and ValueError
    for a name given twice and for a tensor that is not what its key says.
    """
    header: dict[str, Json] = {"__metadata__": {"format": str(FORMAT)}}
    end = 0
    for key, numel in keys:
        if key in header:
            raise ValueError(f"two fragments of {key} on one rank")
        begin, end = end, end + numel * torch.float32.itemsize
        header[key] = {"dtype": "F32", "shape": [numel], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants aligned data

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for (key, numel), tensor in zip(keys, tensors, strict=True):
            if tensor.dtype != torch.float32 or tensor.shape != (numel,):
                raise ValueError(f"{key}: expected {numel} fp32 values, found {tensor.dtype} {list(tensor.shape)}")
            yield memoryview(tensor.detach().cpu().contiguous().numpy().data).cast("B")

    return write_file(path, chunks())


def list_parts(file: str, fragments: Sequence[Fragment]) -> list[Json]:
    """What `write_state` puts into `file`, as records for `build_index`."""
    return [
        {
            "name": fragment.tag.name,
            "shape": list(fragment.tag.shape),
            "dim": fragment.tag.dim,
            "part": asdict(Part(file, fragment.tag.low, fragment.tag.high, fragment.start, fragment.numel)),
        }
        for fragment in fragments
        if fragment.tag.writer
    ]


def build_index(records: Sequence[Any]) -> Index:
    """The index of all ranks' part records. Raises ValueError unless every element is covered exactly once."""
    index: Index = {}
    for record in records:
        shape, dim, part = tuple(record["shape"]), int(record["dim"]), Part(**record["part"])
        known = index.setdefault(record["name"], Entry(shape, dim, ()))
        if (known.shape, known.dim) != (shape, dim):
            raise ValueError(f"{record['name']}: ranks disagree about its shape or how it is cut")
        index[record["name"]] = Entry(shape, dim, (*known.parts, part))
    for name, entry in index.items():
        check_coverage(name, entry)
    return index


def check_coverage(name: str, entry: Entry) -> None:
    """Raises ValueError unless the parts of a parameter cover every element exactly once."""
    boxes: dict[tuple[int, int], list[Part]] = {}
    for part in entry.parts:
        boxes.setdefault((part.low, part.high), []).append(part)
    row = 0
    for (low, high), parts in sorted(boxes.items()):
        if low != row:
            raise ValueError(f"{name}: gap or overlap at row {row} of dimension {entry.dim}")
        row, at = high, 0
        for part in sorted(parts, key=lambda p: p.start):
            if part.start != at:
                raise ValueError(f"{name}: gap or overlap at element {at} of rows {low} to {high}")
            at += part.numel
        if at != math.prod(box_shape(entry.shape, entry.dim, low, high)):
            raise ValueError(f"{name}: rows {low} to {high} are not complete")
    if row != entry.shape[entry.dim]:
        raise ValueError(f"{name}: rows from {row} on are missing")


def index_to_json(index: Index) -> dict[str, Json]:
    """The index as written to disk."""
    parameters: dict[str, Json] = {
        name: {"shape": list(e.shape), "dim": e.dim, "parts": [asdict(p) for p in e.parts]} for name, e in index.items()
    }
    return {"format": FORMAT, "parameters": parameters}


def index_from_json(value: Any) -> Index:
    """Reads what `index_to_json` wrote. Raises InputError for another format, ValueError for a broken index."""
    if value.get("format") != FORMAT:
        raise InputError(
            f"expected a checkpoint of format {FORMAT}, found {value.get('format')!r}: use the same version"
        )
    index = {
        name: Entry(tuple(e["shape"]), int(e["dim"]), tuple(Part(**p) for p in e["parts"]))
        for name, e in value["parameters"].items()
    }
    for name, entry in index.items():
        check_coverage(name, entry)
    return index


def box_shape(shape: Sequence[int], dim: int, low: int, high: int) -> list[int]:
    """Shape of rows [low, high) along `dim`."""
    return [high - low if i == dim else n for i, n in enumerate(shape)]


class StateReader:
    """Reads ranges of a checkpoint's state; a context manager that keeps the files open (mapped, not loaded)."""

    def __init__(self, checkpoint: Path, index: Index) -> None:
        self.index = index
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        self._files: dict[str, tuple[Any, frozenset[str]]] = {}

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, kind: str, tag: Tag, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of the local parameter that `tag` describes: fp32 [numel], on the CPU.

        Raises KeyError for an unknown parameter.
        """
        entry = self.index[tag.name]
        row = math.prod(entry.shape[1:])
        if tag.dim == 0 and entry.dim == 0:  # rows of dimension 0 are contiguous in the whole
            return self._read_flat(kind, tag.name, tag.low * row + start, numel, lambda p: p.low * row + p.start)
        if (tag.dim, tag.low, tag.high) in {(entry.dim, p.low, p.high) for p in entry.parts}:
            return self._read_flat(
                kind, tag.name, start, numel, lambda p: p.start if (p.low, p.high) == (tag.low, tag.high) else None
            )
        whole = self._assemble(kind, tag.name, entry)
        return whole.narrow(tag.dim, tag.low, tag.high - tag.low).reshape(-1)[start : start + numel]

    def read_whole(self, kind: str, name: str) -> Tensor:
        """A whole parameter, or moment of one, at its full shape: fp32, on the CPU."""
        return self._assemble(kind, name, self.index[name])

    def _assemble(self, kind: str, name: str, entry: Entry) -> Tensor:
        boxes = sorted({(part.low, part.high) for part in entry.parts})
        blocks = []
        for box in boxes:
            shape = box_shape(entry.shape, entry.dim, *box)

            def place(part: Part, box: tuple[int, int] = box) -> int | None:
                return part.start if (part.low, part.high) == box else None

            blocks.append(self._read_flat(kind, name, 0, math.prod(shape), place).view(shape))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=entry.dim)

    def _read_flat(self, kind: str, name: str, start: int, numel: int, place: Callable[[Part], int | None]) -> Tensor:
        """Elements [start, start + numel) of flat coordinates in which `place` puts each part (None: not in them)."""
        result, filled = torch.empty(numel, dtype=torch.float32), 0
        for part in self.index[name].parts:
            begin = place(part)
            if begin is None:
                continue
            low, high = max(begin, start), min(begin + part.numel, start + numel)
            if low < high:
                stored = self._slice(part.file, f"{kind}/{name}")
                if stored.get_shape() != [part.numel] or stored.get_dtype() != "F32":
                    raise InputError(f"{part.file}: {kind}/{name} is not what the checkpoint's index says it is")
                result[low - start : high - start] = stored[low - begin : high - begin]
                filled += high - low
        if filled != numel:
            raise InputError(f"{self._checkpoint}: {kind}/{name} holds {filled} of the {numel} elements asked for")
        return result

    def _slice(self, file: str, key: str) -> Any:
        opened, keys = self._open(file)
        if key not in keys:
            raise InputError(
                f"{self._checkpoint}: expected it to hold {key}, found no such tensor in {file} (a snapshot or an "
                "average holds fp32 alone; only a run with train.ema has ema)"
            )
        return opened.get_slice(key)

    def _open(self, file: str) -> tuple[Any, frozenset[str]]:
        if file not in self._files:
            # The name comes from the index: it must not lead out of the checkpoint.
            if Path(file).name != file:
                raise InputError(f"{self._checkpoint}: expected a plain file name in the index, found {file!r}")
            try:
                opened = safe_open(str(self._checkpoint / file), framework="pt", device="cpu")
                entered = self._stack.enter_context(cast(Any, opened))
            except SafetensorError as fault:
                raise InputError(f"{self._checkpoint / file} is no safetensors file ({fault})") from None
            self._files[file] = entered, frozenset(entered.keys())
        return self._files[file]
