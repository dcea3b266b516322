"""The held-out splits: batches for the loss, plain text for BLEU. Every pair exactly once, no randomness."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.api import Batch, zero_weight_batch
from data_pipeline.cells import MicroBatches, Part, lay_out
from data_pipeline.errors import InputError
from data_pipeline.files import read_regular
from data_pipeline.index import Index, mend
from data_pipeline.plan import plan_held_out

SOURCE_TEXT, TARGET_TEXT = "source.txt", "target.txt"


class ValidationBatches:
    """This rank's batches of the held-out splits, the same at every iteration; over all ranks every pair exactly once.

    Batches are dealt round-robin, largest first; every rank has equally many (zero-weight ones fill up), so ranks can
    meet after each. A pair longer than the budget is a batch of its own. The splits are read once and kept in memory.
    """

    def __init__(self, parts: Sequence[Part], budget: int, rank: int, dp: int) -> None:
        """parts: the held-out split of each corpus; budget: padded tokens of a batch, a side.

        Raises InputError for damaged shards.
        """
        if not 0 <= rank < dp:
            raise ValueError(f"expected a rank from 0 to {dp - 1}, found {rank}")
        self.pairs = sum(int(part.reader.block_starts[-1]) for part in parts)
        """Pairs of all splits, on all ranks together."""
        longer = np.concatenate([np.maximum(*part.tokens()) for part in parts])
        self.longest = int(longer.max())
        """Tokens of the longest side of any pair, EOS included: attention takes time and memory with its square."""
        self.over_budget = int((longer > budget).sum())
        """Pairs with a side longer than the budget, each a batch of its own."""
        plans = [plan_held_out(*part.tokens(), budget) for part in parts]
        self._parts: list[MicroBatches] = [
            lay_out(part, np.arange(part.reader.blocks), plan.rows, plan.offsets)
            for part, plan in zip(parts, plans, strict=True)
        ]
        places = [(part, step) for part, plan in enumerate(plans) for step in range(plan.steps)]
        cells = np.concatenate([plan.cells for plan in plans])
        order: list[int] = np.argsort(-cells, kind="stable").tolist()
        self._places = [places[place] for place in order]
        self._rank, self._dp = rank, dp

    def __len__(self) -> int:
        return (len(self._places) + self._dp - 1) // self._dp

    def __iter__(self) -> Iterator[Batch]:
        for turn in range(len(self)):
            number = turn * self._dp + self._rank
            yield self._batch(number) if number < len(self._places) else zero_weight_batch()

    def largest(self) -> Batch:
        """The batch with most padded tokens, the same on every rank. For dry runs."""
        return self._batch(0)

    def _batch(self, number: int) -> Batch:
        part, step = self._places[number]
        return self._parts[part].batch(step, number)


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
