"""Weights-only snapshots in RUN/snapshots, for averaging (Vaswani et al. 2017, section 6.1: the last 5, or 20).

They have the format of checkpoints and a third of their size; the run is never resumed from them.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dist_tfm.checkpoint.layout import list_snapshot_steps, list_unfinished_snapshots, snapshot_dir
from dist_tfm.checkpoint.manager import Accompanying, delete_checkpoint, write_checkpoint
from dist_tfm.engine.base import Engine, Fragment
from dist_tfm.parallel.collectives import Group, Json, together


class SnapshotStore:
    """The snapshots of one run directory, which all ranks see.

    keep: how many of the newest stay. warn: takes a sentence for the user; called on rank 0 only.
    """

    def __init__(self, run: Path, group: Group, keep: int, warn: Callable[[str], None]) -> None:
        self._run, self._group, self._keep, self._warn = run, group, keep, warn

    def save(self, engine: Engine, step: int, counters: dict[str, Json], config: str, tokenizer: Path) -> Path:
        """Writes the master weights at `step` and deletes all but the newest `keep`; collective.

        A run that goes on from an earlier checkpoint comes by steps whose snapshots were written already: these are
        replaced. counters: `step` and `updates` are added. Raises RunError on every rank if it fails on one.
        """
        target = snapshot_dir(self._run, step)
        doing = f"writing the snapshot {target}"
        fragments = [_weights_only(fragment) for fragment in engine.fragments(divide=True)]
        together(self._group, doing, lambda: self._make_room(target))
        accompanying = Accompanying({**counters, "step": step, "updates": engine.updates}, config, tokenizer)
        write_checkpoint(target, fragments, accompanying, self._group, doing)
        if self._group.rank == 0:
            self._rotate(step)
        return target

    def _make_room(self, target: Path) -> None:
        if self._group.rank == 0 and target.exists():
            delete_checkpoint(target)

    def _rotate(self, newest: int) -> None:
        """Later ones, which an attempt wrote that this one resumed before, will be replaced; they do not count."""
        earlier = [step for step in list_snapshot_steps(self._run) if step < newest]
        try:
            for path in list_unfinished_snapshots(self._run):
                shutil.rmtree(path)
            for step in earlier[: max(0, len(earlier) - (self._keep - 1))]:
                delete_checkpoint(snapshot_dir(self._run, step))
        except OSError as fault:
            self._warn(f"an old snapshot could not be deleted ({fault}); training goes on")


def _weights_only(fragment: Fragment) -> Fragment:
    return replace(fragment, views={"fp32": fragment.views["fp32"]})
