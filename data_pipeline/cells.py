"""Micro-batches in memory: the ids of their pairs as they were read, two bytes each, and where each row begins.

Ids are copied once, block by block. A batch is then made by whole rows: each is taken out of the flat ids as one item
of the padded width, and what lies behind its end is cut off by a minimum, as every id is larger than EOS and PAD.
Nothing is looked up token by token.

B sentences in a micro-batch, S padded source length, T padded target length; N pairs in K micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.api import BOS, EOS, PAD, UNK, Batch, Unreadable, zero_weight_batch
from data_pipeline.errors import DamagedError, StoppedError
from data_pipeline.plan import Rows, widths_of
from data_pipeline.ragged import Integers, smallest_unsigned, starts_of
from data_pipeline.shards import ShardReader

NOTHING: Rows = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Part:
    """A prepared split as it takes part in training: alone, or as one corpus of a mixture.

    tag: ids that are put in front of every source; number: of the corpus in the mixture; first_id: added to the
    position of a pair in its split, so that no two corpora share a pair id.
    """

    reader: ShardReader
    name: str = ""
    tag: tuple[int, ...] = ()
    number: int = 0
    first_id: int = 0

    def tokens(self, blocks: Rows | None = None) -> tuple[Rows, Rows]:
        """(source, target) lengths of all pairs of some blocks (default all) in training, tag and EOS too."""
        lengths = self.reader.lengths if blocks is None else lengths_of(self.reader, blocks)
        return (
            lengths[:, 0].astype(np.int64) + len(self.tag) + 1,
            lengths[:, 1].astype(np.int64) + 1,
        )


class Runs:
    """Runs of a flat array, many of one width at a time; each is copied as one item of all its bytes."""

    def __init__(self, flat: Integers) -> None:
        self._flat = flat
        self._views: dict[int, NDArray[np.void]] = {}

    def at(self, starts: Integers, width: int) -> Integers:
        """[B, width]: flat[start : start + width] of each start [B]; a copy."""
        if (view := self._views.get(width)) is None:
            size = self._flat.itemsize
            kind = np.dtype((np.void, width * size))
            view = np.ndarray((len(self._flat) - width + 1,), kind, self._flat, strides=(size,))
            self._views[width] = view
        runs: Integers = view[starts].view(self._flat.dtype).reshape(-1, width)
        return runs


class Side:
    """One side of all micro-batches; row i is the ids of a pair and EOS, behind a prefix."""

    def __init__(self, lengths: Integers, prefix: tuple[int, ...], rows: Rows, offsets: Rows, vocabulary: int) -> None:
        """lengths [pairs]: of all pairs that `fill` will give ids, without prefix and EOS; rows [N]: the pair of each
        row; offsets [K + 1]: the first row of each micro-batch."""
        ends = starts_of(lengths)
        tokens = lengths[rows].astype(np.int64) + len(prefix) + 1
        longest = int(tokens.max(initial=1))
        dtype = smallest_unsigned(vocabulary - 1)
        self._widths: list[int] = widths_of(tokens, offsets).tolist()
        self._tokens = tokens.astype(smallest_unsigned(longest))
        self._starts = ends[rows]
        self._prefix = np.array(prefix, dtype=dtype)
        # There are ids behind the last pair as well, where a row that begins with it may go on to its full width.
        flat: Integers = np.empty(len(prefix) + int(ends[-1]) + longest, dtype=dtype)
        flat[-longest:] = UNK
        self._free = flat[len(prefix) :]
        self._runs = Runs(flat)
        # Taken from longest - tokens on, these bounds let the tokens of a row pass and turn what is behind into PAD.
        bounds: Integers = np.full(2 * longest, PAD, dtype=dtype)
        bounds[: longest - 1] = np.iinfo(dtype).max
        bounds[longest - 1] = EOS
        self._bounds = Runs(bounds)
        self._longest = longest

    def fill(self, ids: Integers | int, count: int) -> None:
        """Sets the next `count` ids: those of pair after pair, or the same for all."""
        self._free[:count] = ids
        self._free = self._free[count:]

    def padded(self, number: int, rows: slice) -> tuple[Integers, NDArray[np.int64]]:
        """(ids EOS PAD... [B, longest], tokens [B]) of micro-batch `number` of these rows; the prefix counts as ids."""
        width, tokens = self._widths[number], self._tokens[rows].astype(np.int64)
        ids = self._runs.at(self._starts[rows], width)
        if len(self._prefix):
            ids[:, : len(self._prefix)] = self._prefix
        return np.minimum(ids, self._bounds.at(self._longest - tokens, width), out=ids), tokens


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches in memory: number k has the rows offsets[k] to offsets[k + 1].

    ids [N]: position of each row's pair in the prepared data; corpus: its corpus' number in the mixture; unreadable:
    the blocks among them whose ids could not be read, and are unknown tokens here.
    """

    source: Side
    target: Side
    offsets: Sequence[int]
    ids: Rows
    corpus: int
    unreadable: tuple[Unreadable, ...] = ()

    def batch(self, number: int, index: int) -> Batch:
        """Micro-batch `number` as number `index` of its step; one without pairs is a zero-weight one."""
        rows = slice(self.offsets[number], self.offsets[number + 1])
        if rows.start == rows.stop:
            return zero_weight_batch()
        source, source_lengths = self.source.padded(number, rows)
        labels, target_lengths = self.target.padded(number, rows)
        return Batch(
            source=source.astype(np.int64),
            target_in=_behind_bos(labels, target_lengths),
            labels=labels.astype(np.int64),
            source_lengths=source_lengths,
            target_lengths=target_lengths,
            pair_ids=self.ids[rows],
            index=index,
            corpus=self.corpus,
        )


def _behind_bos(labels: Integers, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B, T]: BOS ids PAD..., from ids EOS PAD... [B, T], of so many tokens [B]."""
    moved = np.empty(labels.size + 1, dtype=np.int64)
    moved[1:] = labels.reshape(-1)
    moved[np.arange(0, labels.size, labels.shape[1]) + tokens] = PAD  # EOS
    cells = moved[:-1].reshape(labels.shape)
    cells[:, 0] = BOS
    return cells


def lengths_of(reader: ShardReader, blocks: Rows) -> Integers:
    """[pairs, 2]: source and target length of all pairs of these blocks, without EOS."""
    starts = reader.block_starts
    return np.concatenate([reader.lengths[:0], *(reader.lengths[starts[b] : starts[b + 1]] for b in blocks)])


def pairs_of(reader: ShardReader, blocks: Rows) -> Rows:
    """Positions in the split of all pairs of these blocks."""
    starts = reader.block_starts
    return np.concatenate([NOTHING, *(np.arange(starts[b], starts[b + 1]) for b in blocks)])


def lay_out(
    part: Part,
    blocks: Rows,
    rows: Rows,
    offsets: Rows,
    stop: Callable[[], bool] = lambda: False,
    skip_damaged: bool = False,
) -> MicroBatches:
    """Reads whole blocks for micro-batches: number k has the pairs rows[offsets[k] : offsets[k + 1]], by position among
    the pairs of the blocks.

    stop: asked before each block; once it says True, StoppedError is raised. skip_damaged: damaged blocks are noted.
    Raises InputError for those that are not skipped.
    """
    reader = part.reader
    lengths = lengths_of(reader, blocks)
    source, target = (
        Side(lengths[:, side], prefix, rows, offsets, reader.index.vocab_size)
        for side, prefix in enumerate((part.tag, ()))
    )
    unreadable: list[Unreadable] = []
    ends = np.cumsum(reader.block_pairs[blocks])
    for number, end in zip(blocks.tolist(), ends.tolist(), strict=True):
        if stop():
            raise StoppedError
        count = int(reader.block_pairs[number])
        try:
            block = reader.block(number, stop)
            source.fill(block.source, len(block.source))
            target.fill(block.target, len(block.target))
        except DamagedError as fault:
            if not skip_damaged:
                raise
            first = int(reader.block_starts[number]) + part.first_id
            unreadable.append(Unreadable(part.number, number, first, count, str(fault)))
            unread = lengths[end - count : end].sum(axis=0, dtype=np.int64).tolist()
            source.fill(UNK, unread[0])
            target.fill(UNK, unread[1])
    ids = pairs_of(reader, blocks)[rows] + part.first_id
    return MicroBatches(source, target, offsets.tolist(), ids, part.number, tuple(unreadable))
