"""The mean of several checkpoints' weights as one checkpoint (Vaswani et al. 2017, section 6.1).

The result has the canonical format with weights alone (kind fp32), so that whatever reads checkpoints reads it. Nothing
resumes from it.
"""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from dist_tfm.checkpoint.canonical import Entry, Index, Part, StateReader, write_tensors
from dist_tfm.checkpoint.files import FileRecord
from dist_tfm.checkpoint.layout import (
    COMPLETE,
    CONFIG,
    TEMPORARY,
    TOKENIZER,
    list_snapshot_steps,
    list_steps,
    snapshot_dir,
    snapshots_dir,
    state_file,
    step_dir,
    step_of,
)
from dist_tfm.checkpoint.manager import Accompanying, make_anew, publish_checkpoint
from dist_tfm.checkpoint.restore import read_counters
from dist_tfm.checkpoint.weights import find_checkpoint, read_index, verify
from dist_tfm.config.loading import read_config
from dist_tfm.errors import InputError

NEW, REPLACED = ".new", ".old"
AVERAGED = "averaged"
"""In counters.json of an average: the kind of weights and the steps that it is the mean of."""


def find_members(run: Path) -> list[Path]:
    """What can be averaged of a run, by ascending step: its snapshots, or its checkpoints if it has no snapshots.

    Raises InputError if it has neither.
    """
    _refuse_checkpoint(run)
    snapshots = [snapshot_dir(run, step) for step in list_snapshot_steps(run)]
    checkpoints = [step_dir(run, step) for step in list_steps(run)]
    if not snapshots and not checkpoints:
        find_checkpoint(run)  # says what is there instead
        raise InputError(f"{run}: expected a run directory with snapshots or checkpoints, found none")
    return snapshots or checkpoints


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run directory, where a moving average is found. Raises InputError."""
    _refuse_checkpoint(run)
    return find_checkpoint(run)


def choose_last(members: Sequence[Path], asked: int | None) -> list[Path]:
    """The last `asked` of `members`. None: all snapshots (rotation keeps as many as the recipe averages), or the last
    checkpoint.keep checkpoints. Raises InputError if there are fewer than were asked for."""
    if asked is None:
        newest = members[-1]
        is_snapshot = newest.parent.name == snapshots_dir(Path()).name
        asked = len(members) if is_snapshot else min(len(members), read_config(newest / CONFIG).checkpoint.keep)
    _check_count(asked, members, "")
    return list(members[-asked:])


def choose_best(members: Sequence[Path], asked: int, values: Mapping[int, float], larger_is_better: bool) -> list[Path]:
    """The `asked` members whose steps have the best validation values, by ascending step; of equals the later ones.

    values: step to value. Raises InputError if fewer members than asked for have a value.
    """
    scored = [(values[step], step, path) for path in members if (step := step_of(path)) is not None and step in values]
    _check_count(asked, [path for *_, path in scored], " that were written at a validated step (train.validate_every)")
    ranked = sorted(scored, key=lambda entry: (entry[0] if larger_is_better else -entry[0], entry[1]), reverse=True)
    return [path for *_, path in sorted(ranked[:asked], key=lambda entry: entry[1])]


def average_checkpoints(members: Sequence[Path], output: Path, kind: str = "fp32") -> None:
    """Writes the mean of the members' weights (or of another stored kind) as the checkpoint `output`.

    One tensor is in memory at a time; the mean is taken in float64 and rounded to fp32 once. config.yaml and the
    tokenizer are the last member's. An average that stands at `output` is replaced, anything else is not.

    Raises InputError for damaged members, for members of different models or tokenizers, for a kind that they do not
    hold and for an `output` that is no average; OSError.
    """
    _refuse_foreign(output)
    shapes = _agree(members)
    temporary = output.with_name(output.name + TEMPORARY)
    file = state_file(0, 1)
    index: Index = {
        name: Entry(shape, 0, (Part(file, 0, shape[0], 0, math.prod(shape)),)) for name, shape in shapes.items()
    }
    make_anew(temporary)
    try:
        with ExitStack() as stack:
            readers = [stack.enter_context(StateReader(path, read_index(path))) for path in members]
            keys = [(f"fp32/{name}", math.prod(shape)) for name, shape in shapes.items()]
            record = write_tensors(temporary / file, keys, (_mean(readers, kind, name) for name in shapes))
        _publish(output, temporary, {file: record}, index, _accompanying(members, kind))
    except BaseException:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _mean(readers: Sequence[StateReader], kind: str, name: str) -> Tensor:
    """[elements of the parameter], fp32."""
    total = readers[0].read_whole(kind, name).double()
    for reader in readers[1:]:
        total += reader.read_whole(kind, name)
    return (total / len(readers)).float().flatten()


def _accompanying(members: Sequence[Path], kind: str) -> Accompanying:
    last = members[-1]
    counters = read_counters(last)
    return Accompanying(
        counters={
            "step": counters["step"],
            "updates": counters["updates"],
            AVERAGED: {"kind": kind, "steps": [read_counters(path)["step"] for path in members]},
        },
        config=(last / CONFIG).read_text(encoding="utf-8"),
        tokenizer=last / TOKENIZER,
    )


def _publish(
    output: Path, temporary: Path, files: Mapping[str, FileRecord], index: Index, accompanying: Accompanying
) -> None:
    """Completes the new average beside an old one, then puts it in its place."""
    if not output.exists():
        publish_checkpoint(output, temporary, files, index, accompanying)
        return
    complete, replaced = (output.with_name(output.name + suffix) for suffix in (NEW, REPLACED))
    for leftover in (complete, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    publish_checkpoint(complete, temporary, files, index, accompanying)
    os.rename(output, replaced)
    os.rename(complete, output)
    shutil.rmtree(replaced, ignore_errors=True)


def _refuse_foreign(output: Path) -> None:
    if not output.exists():
        return
    try:
        if AVERAGED in read_counters(output):
            return
    except InputError:
        pass
    raise InputError(f"{output}: expected no such directory, or an earlier average, found something else: name another")


def _agree(members: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Verifies every byte of the members; the name and shape of each parameter, the same in all of them."""
    first = members[0]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in members:
        verify(path)
        found = {name: entry.shape for name, entry in read_index(path).items()}
        shapes = shapes or found
        if found != shapes or read_config(path / CONFIG).model != read_config(first / CONFIG).model:
            raise InputError(f"{path}: expected the model of {first}, found another one: average one run's checkpoints")
        if (path / TOKENIZER).read_bytes() != (first / TOKENIZER).read_bytes():
            raise InputError(f"{path}: expected the tokenizer of {first}, found another one: their weights do not mix")
    return shapes


def _refuse_checkpoint(run: Path) -> None:
    if (run / COMPLETE).is_file():
        raise InputError(f"{run}: expected a run directory, found a single checkpoint: name the run that it belongs to")


def _check_count(asked: int, members: Sequence[Path], which: str) -> None:
    if len(members) < asked:
        found = ", ".join(path.name for path in members) or "none"
        raise InputError(
            f"expected {asked} to average{which}, found {len(members)} ({found}): ask for fewer, or train on"
        )
