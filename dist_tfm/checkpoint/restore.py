"""Fills an engine's state from a checkpoint, on all ranks together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dist_tfm.checkpoint.canonical import Index, StateReader
from dist_tfm.checkpoint.layout import COUNTERS
from dist_tfm.checkpoint.weights import check_architecture, find_checkpoint, read_index, verify
from dist_tfm.engine.base import Engine, Fragment
from dist_tfm.errors import InputError
from dist_tfm.parallel.collectives import Group, Json, together


def read_counters(checkpoint: Path) -> dict[str, Json]:
    """counters.json of a verified checkpoint. Raises InputError if it is not one."""
    try:
        counters = json.loads((checkpoint / COUNTERS).read_bytes())
        if isinstance(counters, dict) and all(isinstance(counters.get(k), int) for k in ("step", "updates")):
            return counters
        fault = "it lacks step and updates"
    except (OSError, ValueError) as error:
        fault = str(error)
    raise InputError(f"{checkpoint / COUNTERS}: expected the counters of a checkpoint, found none ({fault})")


def restore_state(checkpoint: Path, engine: Engine, group: Group, sources: Mapping[str, str] | None = None) -> None:
    """Fills the engine's views; the caller then says engine.restored.

    sources: which stored kind fills a view of which kind, views of other kinds being left as they are; None: each view
    is filled from its own kind. Each rank reads only the ranges that it holds. Raises InputError on every rank, before
    anything is changed, if the checkpoint is of another architecture.
    """
    fragments = engine.fragments(divide=False)
    mine: dict[str, Json] = {f.tag.name: list(f.tag.shape) for f in fragments}
    shapes: dict[str, tuple[int, ...]] = {}
    for record in group.gather(mine):  # a rank holds state of some parameters only
        for name, shape in cast(dict[str, list[int]], record).items():
            shapes[name] = tuple(shape)

    def check() -> Index:
        index = read_index(checkpoint)
        check_architecture(checkpoint, index, shapes)
        return index

    index = together(group, f"reading {checkpoint}", check)
    together(group, f"reading {checkpoint}", lambda: _fill(checkpoint, index, fragments, sources))


def load_weights_only(path: Path, engine: Engine, group: Group) -> None:
    """Starts a new run from the master weights of a checkpoint or run directory: no moments, no counters, update 0.
    A moving average of the weights starts there too.

    Every byte is verified first, the files being divided over the ranks; nothing of the other run changes. Raises
    InputError on every rank if it is missing, damaged or of another architecture.
    """
    checkpoint = together(group, f"looking for a checkpoint in {path}", lambda: find_checkpoint(path))
    together(group, f"verifying {checkpoint}", lambda: verify(checkpoint, group.rank, group.size))
    restore_state(checkpoint, engine, group, {"fp32": "fp32", "ema": "fp32"})
    engine.restored(0)


def _fill(checkpoint: Path, index: Index, fragments: list[Fragment], sources: Mapping[str, str] | None) -> None:
    with StateReader(checkpoint, index) as reader:
        for fragment in fragments:
            for kind, view in fragment.views.items():
                if (stored := kind if sources is None else sources.get(kind)) is not None:
                    view.copy_(reader.read(stored, fragment.tag, fragment.start, fragment.numel))
