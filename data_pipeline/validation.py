"""The held-out split: batches for the loss, plain text for BLEU. Every pair exactly once, no randomness."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipeline.api import Batch, zero_weight_batch
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular
from data_pipeline.index import Index, mend
from data_pipeline.plan import plan_held_out
from data_pipeline.shards import ShardReader
from data_pipeline.window import read_blocks

SOURCE_TEXT, TARGET_TEXT = "source.txt", "target.txt"


class ValidationBatches:
    """This rank's batches of the held-out split, the same at every iteration; over all ranks every pair exactly once.

    Batches are dealt round-robin, largest first; every rank has equally many (zero-weight ones fill up), so ranks can
    meet after each. A pair longer than the budget is a batch of its own. The split is read once and kept in memory.
    """

    def __init__(self, reader: ShardReader, budget: int, rank: int, dp: int) -> None:
        """budget: padded tokens of a batch, a side. Raises InputError for damaged shards."""
        if not 0 <= rank < dp:
            raise ValueError(f"expected a rank from 0 to {dp - 1}, found {rank}")
        self.pairs = int(reader.block_starts[-1])
        """Pairs of the whole split, on all ranks together."""
        self._pairs = read_blocks(reader, np.arange(reader.blocks))
        sides = (self._pairs.source.lengths + 1, self._pairs.target.lengths + 1)
        longer = np.maximum(*sides)
        self.longest = int(longer.max())
        """Tokens of the longest side of any pair, EOS included: attention takes time and memory with its square."""
        self.over_budget = int((longer > budget).sum())
        """Pairs with a side longer than the budget, each a batch of its own."""
        self._plan = plan_held_out(*sides, budget)
        self._rank, self._dp = rank, dp

    def __len__(self) -> int:
        return (self._plan.steps + self._dp - 1) // self._dp

    def __iter__(self) -> Iterator[Batch]:
        for turn in range(len(self)):
            number = turn * self._dp + self._rank
            yield self._batch(number) if number < self._plan.steps else zero_weight_batch()

    def largest(self) -> Batch:
        """The batch with most padded tokens, the same on every rank. For dry runs."""
        return self._batch(0)

    def _batch(self, number: int) -> Batch:
        return self._pairs.batch(self._plan.rows_of(number, 0), number)


def read_texts(folder: Path, index: Index) -> tuple[list[str], list[str]]:
    """(sources, references) of the held-out split, cleaned; line i belongs to pair id i. Raises InputError."""
    texts: list[list[str]] = []
    for name in (SOURCE_TEXT, TARGET_TEXT):
        path = folder / name
        try:
            content = read_regular(path)
        except FileNotFoundError:
            raise InputError(f"{path} is missing: {mend(folder)}") from None
        except OSError as fault:
            raise InputError(f"{path} cannot be read: {fault.strerror or fault}") from None
        if hashlib.sha256(content).hexdigest() != index.texts.get(name):
            raise InputError(f"{path} does not match the index: {mend(folder)}")
        try:
            # Split on \n alone: a segment may hold what str.splitlines takes for a line end.
            texts.append(content.decode("utf-8").split("\n")[:-1])
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8: {mend(folder)}") from None
    return texts[0], texts[1]
