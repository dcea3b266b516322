"""Blocks that cannot be read, agreed on: all ranks leave out what any of them found damaged (data.on_error: skip)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from data_pipeline.api import StatefulLoader, StepBatches, Unreadable
from data_pipeline.unreadable import reasons
from dist_tfm.errors import InputError
from dist_tfm.metrics.writers import Console
from dist_tfm.parallel.collectives import Group


def agree_on_damage(
    group: Group, loader: StatefulLoader, step: StepBatches, console: Console
) -> tuple[StepBatches, Sequence[Unreadable]]:
    """(the step without the pairs that any rank found unreadable, their blocks), on every rank; says what they are.

    Collective: to be called on all ranks if one of them has blocks in `step.unreadable`. Raises InputError, on every
    rank, if too many pairs are lost.
    """
    mine = [asdict(block) for block in step.unreadable]
    everyones = cast(list[list[dict[str, Any]]], group.gather(cast(Any, mine)))
    # The first rank's reason counts: a path or an address may be another one elsewhere.
    found: dict[tuple[int, int], Unreadable] = {}
    for block in (Unreadable(**record) for records in everyones for record in records):
        found.setdefault((block.corpus, block.block), block)
    blocks: Sequence[Unreadable] = list(found.values())
    try:
        step = loader.leave_out(step, blocks)
    except InputError as fault:
        fault.shared = True
        raise
    lost = sum(block.pairs for block in blocks)
    console.say(f"warning: {lost:,} training pairs are left out, {len(blocks)} block(s): {reasons(blocks)}")
    return step, blocks


def nothing_left(step: int) -> InputError:
    """The error of a step of which no rank could read a single pair."""
    error = InputError(f"no pair of step {step} can be read: mend the shards, or raise data.window_pairs in a new run")
    error.shared = True
    return error
