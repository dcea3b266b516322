"""Saves and restores a run's checkpoints, on all ranks together: either all succeed or all raise.

A checkpoint is written to step_N.tmp, every file and directory is synced, and one rename publishes it: at any moment a
kill leaves step_N complete or absent. A damaged one is moved aside, never overwritten and never deleted.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from dist_tfm.checkpoint.canonical import build_index, index_to_json, list_parts, write_state
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
)
from dist_tfm.checkpoint.manifest import find_faults, manifest_bytes, read_manifest
from dist_tfm.checkpoint.restore import read_counters, restore_state
from dist_tfm.engine.base import Engine
from dist_tfm.errors import DistTfmError, RunError
from dist_tfm.parallel.collectives import Group, Json, together


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
        temporary = target.with_name(target.name + TEMPORARY)
        doing = f"writing the checkpoint {target}"
        rank, size = self._group.rank, self._group.size
        together(self._group, doing, lambda: self._prepare(target, temporary) if rank == 0 else None)
        try:
            name = state_file(rank, size)
            fragments = engine.fragments(divide=True)
            record = together(self._group, doing, lambda: write_state(temporary / name, fragments))
            mine: Json = {
                "file": name,
                "size": record.size,
                "sha256": record.sha256,
                "parts": list_parts(name, fragments),
            }
            records = cast(list[dict[str, Json]], self._group.gather(mine))
            counters = {**counters, "step": step, "updates": engine.updates}

            def publish() -> None:
                if rank == 0:
                    texts = {COUNTERS: dump_json(counters), CONFIG: config.encode()}
                    _publish(target, temporary, step, records, texts, tokenizer)

            together(self._group, doing, publish)
        except DistTfmError:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self._group.barrier()  # every rank is alive: they have just agreed on the failure
            raise
        if rank == 0:
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
        restore_state(checkpoint, engine, self._group, ("fp32", "exp_avg", "exp_avg_sq"))
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

    def _prepare(self, target: Path, temporary: Path) -> None:
        if target.exists():
            raise RunError(f"{target} exists already and is not overwritten: move it away")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)

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
                    _delete(step_dir(self._run, step))
        except OSError as fault:
            self._warn(f"an old checkpoint could not be deleted ({fault}); training goes on")

    def _say(self, sentence: str) -> None:
        if self._group.rank == 0:
            self._warn(sentence)


def _publish(
    target: Path,
    temporary: Path,
    step: int,
    records: Iterable[dict[str, Json]],
    texts: dict[str, bytes],
    tokenizer: Path,
) -> None:
    """Writes what all ranks share, COMPLETE last, and renames. Runs on rank 0 once every rank's file is on the disk."""
    records = list(records)
    index = build_index([part for record in records for part in cast(list[Json], record["parts"])])
    contents = {**texts, INDEX: dump_json(index_to_json(index)), TOKENIZER: tokenizer.read_bytes()}
    files = {
        str(record["file"]): FileRecord(int(cast(int, record["size"])), str(record["sha256"])) for record in records
    }
    files |= {name: write_file(temporary / name, [content]) for name, content in contents.items()}
    write_file(temporary / COMPLETE, [manifest_bytes(step, files)])
    sync_directory(temporary)
    os.rename(temporary, target)
    sync_directory(target.parent)
    sync_directory(target.parent.parent)


def _delete(checkpoint: Path) -> None:
    """Renames before deleting, so that a kill leaves no half-deleted step_N."""
    doomed = checkpoint.with_name(checkpoint.name + TEMPORARY)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)
