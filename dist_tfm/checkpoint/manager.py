"""Saves and restores a run's checkpoints, on all ranks together: either all succeed or all raise.

A checkpoint is written to step_N.tmp, every file and directory is synced, and one rename publishes it: at any moment a
kill leaves step_N complete or absent. A damaged one is moved aside, never overwritten and never deleted.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from dist_tfm.checkpoint.canonical import Index, build_index, index_to_json, list_parts, write_state
from dist_tfm.checkpoint.files import FileRecord, dump_json, sync_directory, write_file
from dist_tfm.checkpoint.layout import (
    COMPLETE,
    CONFIG,
    COUNTERS,
    INDEX,
    TEMPORARY,
    TOKENIZER,
    checkpoints_dir,
    free_damaged_name,
    list_damaged,
    list_steps,
    list_unfinished,
    state_file,
    step_dir,
    step_of,
)
from dist_tfm.checkpoint.manifest import find_faults, manifest_bytes, read_manifest
from dist_tfm.checkpoint.restore import read_counters, restore_state
from dist_tfm.engine.base import Engine, Fragment
from dist_tfm.errors import DistTfmError, RunError
from dist_tfm.parallel.collectives import Group, Json, together


class Accompanying(NamedTuple):
    """What stands beside the state: counters (with step and updates), the text of config.yaml, a tokenizer to copy."""

    counters: dict[str, Json]
    config: str
    tokenizer: Path


class CheckpointManager:
    """Checkpoints of one run directory, which all ranks see. Every public method is collective.

    keep: how many of the newest stay. warn: takes a sentence for the user; called on rank 0 only.
    """

    def __init__(self, run: Path, group: Group, keep: int, warn: Callable[[str], None]) -> None:
        self._run, self._group, self._keep, self._warn = run, group, keep, warn

    def save(
        self,
        engine: Engine,
        step: int,
        counters: dict[str, Json],
        config: str,
        tokenizer: Path,
        best_step: int | None = None,
    ) -> Path:
        """Writes the checkpoint of `step`, then deletes what `keep` and `best_step` do not protect.

        counters: whatever else the run needs to go on (no NaN); `step` and `updates` are added. config: text of
        config.yaml. tokenizer: file copied in.
        Raises RunError on every rank if it fails on one (no space left, say); older checkpoints are then untouched.
        """
        target = step_dir(self._run, step)
        doing = f"writing the checkpoint {target}"
        together(self._group, doing, lambda: _refuse_existing(target))
        accompanying = Accompanying({**counters, "step": step, "updates": engine.updates}, config, tokenizer)
        write_checkpoint(target, engine.fragments(divide=True), accompanying, self._group, doing)
        if self._group.rank == 0:
            self._rotate(step, best_step)
        return target

    def newest_valid(self) -> Path | None:
        """The newest checkpoint whose every byte verifies, agreed by all ranks; None if the run has none yet.

        Damaged ones are named in a warning and moved aside to step_N.damaged. Raises RunError if there were
        checkpoints and all of them are damaged, now or at an earlier start: a run never starts again by itself.
        """
        listing = cast(list[list[str]], self._group.broadcast(self._list() if self._group.rank == 0 else None))
        names, unfinished, aside = listing
        for name in unfinished:
            self._say(f"{name} was not finished when its writer ended; it is ignored")
        for name in names:
            checkpoint = checkpoints_dir(self._run) / name
            faults = self._verify(checkpoint)
            if not faults:
                return checkpoint
            moved = self._move_aside(checkpoint)
            self._say(f"checkpoint {checkpoint} is damaged ({'; '.join(faults[:3])}); it was moved to {moved.name}")
            aside.append(moved.name)
        if aside:
            raise RunError(
                f"{self._run}: every checkpoint is damaged ({', '.join(aside)}): restore one from a copy, or set "
                "another train.run_dir to start from the beginning"
            )
        return None

    def load(self, checkpoint: Path, engine: Engine) -> dict[str, Json]:
        """Fills the engine with a verified checkpoint's weights and moments and returns its counters.

        Raises InputError on every rank, before anything is changed, for a checkpoint of another architecture.
        """
        counters = together(self._group, f"reading {checkpoint}", lambda: read_counters(checkpoint))
        restore_state(checkpoint, engine, self._group)
        engine.restored(cast(int, counters["updates"]))
        return counters

    def _list(self) -> Json:
        names: list[Json] = [step_dir(self._run, step).name for step in reversed(list_steps(self._run))]
        others = (
            [cast(Json, p.name) for p in paths] for paths in (list_unfinished(self._run), list_damaged(self._run))
        )
        return [names, *others]

    def _verify(self, checkpoint: Path) -> list[str]:
        """Faults found by all ranks, the files being divided over them."""

        def check() -> list[str]:
            try:
                manifest = read_manifest(checkpoint)
            except ValueError as fault:
                return [str(fault)]
            if manifest.step != step_of(checkpoint):
                return [f"it holds step {manifest.step}, which its name denies"]
            return find_faults(checkpoint, manifest, self._group.rank, self._group.size)

        faults = together(self._group, f"verifying {checkpoint}", check)
        reports = cast(list[list[str]], self._group.gather(cast(Json, faults)))
        return list(dict.fromkeys(fault for report in reports for fault in report))

    def _move_aside(self, checkpoint: Path) -> Path:
        moved = cast(str, self._group.broadcast(str(free_damaged_name(checkpoint)) if self._group.rank == 0 else None))

        def move() -> None:
            if self._group.rank == 0:
                os.rename(checkpoint, moved)
                sync_directory(checkpoint.parent)

        together(self._group, f"moving the damaged {checkpoint} aside", move)
        return Path(moved)

    def _rotate(self, newest: int, best: int | None) -> None:
        """Deletes old checkpoints and what killed writers left. The one just written, `newest`, is valid and stays.

        Steps above it belong to no future of this run only if they were moved aside; they are left alone.
        """
        earlier = [step for step in list_steps(self._run) if step < newest]
        kept = {newest, best, *earlier[max(0, len(earlier) - (self._keep - 1)) :]}
        try:
            for path in list_unfinished(self._run):
                shutil.rmtree(path)
            for step in earlier:
                if step not in kept:
                    delete_checkpoint(step_dir(self._run, step))
        except OSError as fault:
            self._warn(f"an old checkpoint could not be deleted ({fault}); training goes on")

    def _say(self, sentence: str) -> None:
        if self._group.rank == 0:
            self._warn(sentence)


def write_checkpoint(
    target: Path, fragments: Sequence[Fragment], accompanying: Accompanying, group: Group, doing: str
) -> None:
    """Writes the views of all ranks' fragments as the checkpoint `target`, which must not exist; collective.

    doing: completes "failed while ...". Raises RunError on every rank if it fails on one, and leaves nothing then.
    """
    temporary = target.with_name(target.name + TEMPORARY)
    rank, size = group.rank, group.size
    together(group, doing, lambda: make_anew(temporary) if rank == 0 else None)
    try:
        name = state_file(rank, size)
        record = together(group, doing, lambda: write_state(temporary / name, fragments))
        parts = list_parts(name, fragments)
        mine: Json = {"file": name, "size": record.size, "sha256": record.sha256, "parts": parts}
        records = cast(list[dict[str, Json]], group.gather(mine))

        def publish() -> None:
            if rank == 0:
                index = build_index([part for record in records for part in cast(list[Json], record["parts"])])
                written = {str(r["file"]): FileRecord(int(cast(int, r["size"])), str(r["sha256"])) for r in records}
                publish_checkpoint(target, temporary, written, index, accompanying)

        together(group, doing, publish)
    except DistTfmError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        group.barrier()  # every rank is alive: they have just agreed on the failure
        raise


def make_anew(temporary: Path) -> None:
    """An empty directory, in place of what a killed writer left there."""
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def publish_checkpoint(
    target: Path, temporary: Path, written: Mapping[str, FileRecord], index: Index, accompanying: Accompanying
) -> None:
    """Writes what stands beside the state files `written`, COMPLETE last, and renames. One process does it."""
    counters, config, tokenizer = accompanying
    contents = {
        COUNTERS: dump_json(counters),
        CONFIG: config.encode(),
        INDEX: dump_json(index_to_json(index)),
        TOKENIZER: tokenizer.read_bytes(),
    }
    files = {**written, **{name: write_file(temporary / name, [content]) for name, content in contents.items()}}
    step = cast(int, counters["step"])
    write_file(temporary / COMPLETE, [manifest_bytes(step, files)])
    sync_directory(temporary)
    os.rename(temporary, target)
    sync_directory(target.parent)
    sync_directory(target.parent.parent)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise RunError(f"{target} exists already and is not overwritten: move it away")


def delete_checkpoint(checkpoint: Path) -> None:
    """Renames before deleting, so that a kill leaves no half-deleted step_N."""
    doomed = checkpoint.with_name(checkpoint.name + TEMPORARY)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)
