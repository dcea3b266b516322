"""Blocks that cannot be read, and batches without their pairs (data.on_error: skip).

The plan is made from lengths alone, so it stays what it was on every rank: the pairs of such a block are taken out of
the micro-batches that they were planned for, and nothing else moves.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.api import Batch, LostBlock, Unreadable, zero_weight_batch
from data_pipeline.errors import InputError

SHOWN = 3
"""Reasons that a sentence names at most."""


@dataclass(frozen=True)
class Damage:
    """What was found so far. pairs: of all corpora that are trained on; most: share of them that may be left out.

    before: blocks that earlier attempts of the run have left out. They count; but only what is found again is left out
    again, since shards may have been mended.
    """

    pairs: int
    most: float
    found: frozenset[Unreadable] = frozenset()
    before: tuple[LostBlock, ...] = ()

    def __add__(self, more: Iterable[Unreadable]) -> "Damage":
        """With more blocks; one that is known keeps its first reason. Raises InputError if these are too many."""
        known = {(block.corpus, block.block) for block in self.found}
        new = [block for block in more if (block.corpus, block.block) not in known]
        if not new:
            return self
        grown = replace(self, found=self.found.union(new))
        if grown.lost > self.most * self.pairs:
            raise InputError(
                f"{grown.lost:,} of {self.pairs:,} training pairs cannot be read, more than data.most_skipped="
                f"{self.most:g} of them ({reasons(new)}): mend the shards, or allow more"
            )
        return grown

    @property
    def lost(self) -> int:
        """Pairs of the blocks, each counted once."""
        earlier = {(block.corpus, block.block): block.pairs for block in self.before}
        return sum((earlier | {(block.corpus, block.block): block.pairs for block in self.found}).values())


def reasons(blocks: Collection[Unreadable]) -> str:
    """Why blocks cannot be read: the first few reasons, each once."""
    different = sorted({block.reason for block in blocks})
    more = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return "; ".join(different[:SHOWN]) + more


def leave_out(batch: Batch, blocks: Collection[Unreadable]) -> Batch:
    """The micro-batch without the pairs of these blocks: padded to its longest pair that is left, or zero-weight."""
    if not blocks or not len(batch.pair_ids):
        return batch
    firsts, ends = np.array(sorted((block.first_id, block.first_id + block.pairs) for block in blocks)).T
    place = np.searchsorted(firsts, batch.pair_ids, side="right") - 1
    rows = np.flatnonzero((place < 0) | (batch.pair_ids >= ends[place]))
    if len(rows) == len(batch.pair_ids):
        return batch
    if not len(rows):
        return zero_weight_batch()
    sources, targets = batch.source_lengths[rows], batch.target_lengths[rows]
    return replace(
        batch,
        source=batch.source[rows, : int(sources.max())],
        target_in=batch.target_in[rows, : int(targets.max())],
        labels=batch.labels[rows, : int(targets.max())],
        source_lengths=sources,
        target_lengths=targets,
        pair_ids=batch.pair_ids[rows],
    )
