"""From lengths to micro-batches: pure functions of (lengths, configuration, seed, epoch, window), numpy only.

A step is cut into exactly M micro-batches of at most `budget` = batch_tokens / M padded tokens a side. Source and
target lengths vary apart, so a window is split in both dimensions: pairs are sorted by their longer side into strips,
inside a strip by (source - target), in alternating directions; this one order is then cut wherever the budget is full.
Cutting depends on the longer side alone, so nearly every micro-batch is full, and both dimensions pad little.
No ranks, no workers, no hash seeds enter anywhere, and there is no loop over pairs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.ragged import positions_of, starts_of

Lengths = NDArray[np.integer[Any]]
Rows = NDArray[np.int64]

# What a random stream is for. Part of the data order: changing a number changes every run.
_BLOCK_ORDER, _WINDOW_PLAN, MIXTURE_START = 1, 2, 3


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one window, in the order of training.

    Micro-batch j of step t is number t * M + j, and holds the pairs rows[offsets[t * M + j] : offsets[t * M + j + 1]].
    rows [N]: pairs by their position in the window; offsets [K + 1]; source_widths, target_widths [K]: longest pair of
    each micro-batch, EOS included (0 for an empty one); left_out: pairs with a side longer than the budget.
    """

    rows: Rows
    offsets: Rows
    source_widths: Rows
    target_widths: Rows
    micro_batches: int
    budget: int
    left_out: Rows
    tokens: tuple[int, int]

    @property
    def steps(self) -> int:
        """Steps in the window; each has exactly M micro-batches."""
        return len(self.source_widths) // self.micro_batches

    def piece(self, number: int) -> Rows:
        """Pairs of micro-batch `number` of the window."""
        return self.rows[self.offsets[number] : self.offsets[number + 1]]

    def rows_of(self, step: int, index: int) -> Rows:
        """Pairs of micro-batch `index` of a step."""
        return self.piece(step * self.micro_batches + index)

    @property
    def cells(self) -> Rows:
        """[K]: padded tokens of each micro-batch, both sides together: its cost."""
        cells: Rows = np.diff(self.offsets) * (self.source_widths + self.target_widths)
        return cells

    @property
    def padding(self) -> float:
        """Share of all cells that hold no token."""
        return 1.0 - sum(self.tokens) / max(1, int(self.cells.sum()))

    @property
    def fill(self) -> float:
        """Real tokens of the window's larger side over the budget of all its micro-batches."""
        return max(self.tokens) / max(1, self.budget * len(self.source_widths))


def generator(*key: int) -> np.random.Generator:
    """A generator that depends on these integers alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([part & (1 << 64) - 1 for part in key])))


def window_blocks(block_pairs: Lengths, window_pairs: int, lanes: int, seed: int, epoch: int) -> list[list[Rows]]:
    """[window][lane]: the blocks of each window of an epoch, ascending.

    Blocks are permuted by (seed, epoch) and dealt to the lanes, the largest first, so that lanes differ by one block at
    most. Consecutive whole blocks of a lane make a window of at most window_pairs (one block at least). Windows of a
    lane get equally many blocks, so that none is too small to be planned well; all lanes have the same number of
    windows, some of them empty where blocks are few.
    """
    most = max(1, window_pairs // int(block_pairs.max()))
    order = generator(seed, epoch, _BLOCK_ORDER).permutation(len(block_pairs))
    by_size = np.argsort(-block_pairs[order], kind="stable")
    windows = -(-len(order) // (lanes * most))
    dealt = (order[np.sort(by_size[lane::lanes])] for lane in range(lanes))
    parts = [np.array_split(blocks, windows) for blocks in dealt]
    return [[np.sort(lane[window]) for lane in parts] for window in range(windows)]


@dataclass(frozen=True)
class Cuts:
    """Pairs in planning order, cut wherever the budget is full: what a plan is made of, once its steps are known.

    rows [N]: those that fit the budget, in order; source, target [N]: their lengths, EOS included; offsets: where they
    are cut; left_out: the others. rng: what is drawn next decides the order of steps.
    """

    rows: Rows
    source: Lengths
    target: Lengths
    offsets: Rows
    left_out: Rows
    budget: int
    rng: np.random.Generator

    def steps(self, micro_batches: int) -> int:
        """Steps of `micro_batches` each that hold all pieces."""
        return -(-(len(self.offsets) - 1) // micro_batches)

    def plan(self, micro_batches: int, steps: int) -> Plan:
        """The plan of `steps` steps (at least `steps(micro_batches)`): pieces are split further until they are enough.

        To be called once: it draws from rng.
        """
        offsets = split_to_count(self.offsets, np.maximum(self.source, self.target), steps * micro_batches)
        widths = (widths_of(self.source, offsets), widths_of(self.target, offsets))
        order = _step_order(np.diff(offsets) * (widths[0] + widths[1]), micro_batches, self.rng)
        rows, offsets = _take(self.rows, offsets, order)
        return Plan(
            rows=rows,
            offsets=offsets,
            source_widths=widths[0][order],
            target_widths=widths[1][order],
            micro_batches=micro_batches,
            budget=self.budget,
            left_out=self.left_out,
            tokens=(int(self.source.sum(dtype=np.int64)), int(self.target.sum(dtype=np.int64))),
        )


def cut_window(source_lengths: Lengths, target_lengths: Lengths, budget: int, key: tuple[int, ...]) -> Cuts:
    """Orders and cuts pairs of these lengths (both [N], EOS included): all that has to be known to count steps.

    key: (seed, epoch, window), and the lane of all lanes but the first.
    """
    rng = generator(*key, _WINDOW_PLAN)
    fits = np.maximum(source_lengths, target_lengths) <= budget
    rows, source, target = two_dimensional_order(source_lengths, target_lengths, np.flatnonzero(fits), budget, rng)
    longer = np.maximum(source, target)
    # A random first cut moves all later ones, so that also windows without equal lengths are cut anew each epoch.
    first = int(rng.integers(1, budget // int(longer[0]) + 1)) if len(rows) else 0
    return Cuts(rows, source, target, cut_to_budget(longer, budget, first), np.flatnonzero(~fits), budget, rng)


def plan_window(
    source_lengths: Lengths, target_lengths: Lengths, budget: int, micro_batches: int, key: tuple[int, int, int]
) -> Plan:
    """Plans pairs of these lengths (both [N], EOS included) into steps of exactly M micro-batches.

    key: (seed, epoch, window). Every pair with both sides within the budget is in exactly one micro-batch; the number
    of micro-batches is a multiple of M, empty ones only where there are fewer than M pairs.
    """
    cuts = cut_window(source_lengths, target_lengths, budget, key)
    return cuts.plan(micro_batches, cuts.steps(micro_batches))


def plan_held_out(source_lengths: Lengths, target_lengths: Lengths, budget: int) -> Plan:
    """Plans a held-out set: every pair, without randomness, largest micro-batches first; M is 1.

    A pair with a side longer than the budget gets a micro-batch of its own.
    """
    source = source_lengths.astype(np.int64)
    target = target_lengths.astype(np.int64)
    longer = np.maximum(source, target)
    fitting = np.flatnonzero(longer <= budget)
    rows, *sides = two_dimensional_order(source, target, fitting, budget, generator(_WINDOW_PLAN))
    offsets = cut_to_budget(np.maximum(*sides), budget, len(rows))
    alone = np.flatnonzero(longer > budget)
    rows = np.concatenate((rows, alone))
    offsets = np.concatenate((offsets, offsets[-1] + 1 + np.arange(len(alone))))
    cost = np.diff(offsets) * (widths_of(source[rows], offsets) + widths_of(target[rows], offsets))
    rows, offsets = _take(rows, offsets, np.argsort(-cost, kind="stable"))
    return Plan(
        rows=rows,
        offsets=offsets,
        source_widths=widths_of(source[rows], offsets),
        target_widths=widths_of(target[rows], offsets),
        micro_batches=1,
        budget=budget,
        left_out=np.zeros(0, dtype=np.int64),
        tokens=(int(source.sum()), int(target.sum())),
    )


def largest_micro_batch(source_lengths: Lengths, target_lengths: Lengths, budget: int) -> Rows:
    """The pairs (positions in the lengths, both [N], EOS included) that make the most cells within the budget.

    No micro-batch of any window, epoch or seed has more cells, whichever pairs meet in it: of all pairs up to a longer
    side L, as many as the budget holds, among them the longest source and the longest target; the best L is taken, the
    largest of several. At least one pair must fit. Time and memory are those of a few passes over the lengths.
    """
    source, target = source_lengths.astype(np.int64), target_lengths.astype(np.int64)
    longer = np.maximum(source, target)
    fits = np.flatnonzero(longer <= budget)
    longer, tokens = longer[fits], (source + target)[fits]
    most_source, most_target, most_tokens = (_most_up_to(longer, side) for side in (source[fits], target[fits], tokens))
    # [0] stands for L = 1: no pair is shorter, with its EOS.
    rows = np.minimum(budget // np.arange(1, len(most_tokens) + 1), np.cumsum(np.bincount(longer - 1)))
    # A single pair has to have both widths itself.
    cells = rows * np.where(rows > 1, most_source + most_target, most_tokens)
    longest = len(cells) - int(np.argmax(cells[::-1]))
    among = fits[longer <= longest]
    count = int(rows[longest - 1])
    ranked = among[np.argsort(-(source + target)[among], kind="stable")]
    if count == 1:
        return ranked[:1]
    widest = np.unique([among[np.argmax(source[among])], among[np.argmax(target[among])]])
    return np.concatenate((widest, ranked[~np.isin(ranked, widest)]))[:count]


def _most_up_to(longer: Rows, values: Rows) -> Rows:
    """[longest]: for each L from 1, the largest of the values of all pairs whose longer side is at most L."""
    most = np.zeros(int(longer.max()), dtype=np.int64)
    np.maximum.at(most, longer - 1, values)
    return np.maximum.accumulate(most)


def two_dimensional_order(
    source: Lengths, target: Lengths, rows: Rows, budget: int, rng: np.random.Generator
) -> tuple[Rows, Lengths, Lengths]:
    """`rows` in an order in which neighbours have like lengths on both sides, equal ones in random order; and their
    source and target lengths.

    A strip takes all pairs whose longer side lies in a range of W lengths. A wide strip pads the longer side by about
    W / 2 on both sides; a narrow one holds few micro-batches, so each spans a wide range of source - target. With D the
    spread of that difference and m micro-batches for each length, the sum of both is least at W = sqrt(D / 2m).
    """
    both = _side_by_side(source, target)
    if not len(rows):
        return rows, both[:0, 0], both[:0, 1]
    rows = rng.permutation(rows)
    both = _rows_of(both, rows)
    longer = np.maximum(both[:, 0], both[:, 1]).astype(np.int64)
    difference = np.subtract(both[:, 0], both[:, 1], dtype=np.int64)
    pairs = np.bincount(longer)
    scale = np.arange(len(pairs), dtype=np.float64)
    batches = pairs * scale / budget
    mean = np.bincount(longer, weights=difference) / np.maximum(pairs, 1)
    spread = scale * (np.abs(difference - mean[longer]).sum() / longer.sum())
    # Strips of less than one length would gain nothing: pairs of one length pad the longer side by nothing.
    strips_per_length = np.minimum(1.0, np.sqrt(2.0 * batches / np.maximum(spread, 1e-9)))
    strip = np.floor(np.cumsum(strips_per_length) + rng.random()).astype(np.int64)
    # One sort by (strip, difference, with its sign turned in every other strip): both fit into an integer easily.
    span = int(np.abs(difference).max()) + 1
    sign = np.where(strip % 2 == 0, 1, -1)
    base = (strip - strip[int(longer.min())]) * (2 * span) + span
    order = _stable_order(base[longer] + sign[longer] * difference)
    both = _rows_of(both, order)
    return rows[order], both[:, 0], both[:, 1]


def _side_by_side(source: Lengths, target: Lengths) -> Lengths:
    """[N, 2]: both lengths of each pair in few bytes, so that a pair's are found at one place."""
    longest = max(int(source.max(initial=0)), int(target.max(initial=0)))
    kind = np.uint16 if longest < 1 << 16 else np.uint32 if longest < 1 << 32 else np.int64
    both: Lengths = np.empty((len(source), 2), dtype=kind)
    both[:, 0], both[:, 1] = source, target
    return both


def _rows_of(both: Lengths, rows: Rows) -> Lengths:
    """both[rows], each pair of lengths moved as one number where it fits into one."""
    if both.itemsize == 8:
        return both[rows]
    whole = np.dtype(f"u{2 * both.itemsize}")
    found: Lengths = both.view(whole).reshape(-1)[rows].view(both.dtype).reshape(-1, 2)
    return found


def _stable_order(keys: Rows) -> Rows:
    """np.argsort(keys, kind="stable") of keys that are not negative, by radix sort as far as numpy has one: 16 bits."""
    largest = int(keys.max())
    if largest >> 32:
        return np.argsort(keys, kind="stable")
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    if largest >> 16:
        order = order[np.argsort((keys >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def cut_to_budget(longer: Lengths, budget: int, first: int) -> Rows:
    """Offsets [K + 1] that cut rows (longer [N]: longer side of each, in order, none above the budget) greedily:
    rows x longest <= budget for each, except that the first piece has at most `first` rows."""
    offsets = [0]
    position, total = 0, len(longer)
    while position < total:
        most = budget // int(longer[position])
        if position == 0:
            most = min(most, first)
        # The longest of the next `most` rows leaves room for `fitting`. Where as many rows or fewer stand before it,
        # that is what fits; else the piece must end before it, and the rows up to there are looked at alike.
        while True:
            place = int(longer[position : position + most].argmax())
            fitting = budget // int(longer[position + place])
            if fitting >= place:
                break
            most = place
        position = min(position + min(most, fitting), total)
        offsets.append(position)
    return np.array(offsets, dtype=np.int64)


def split_to_count(offsets: Rows, longer: Lengths, count: int) -> Rows:
    """Halves the largest pieces until there are `count`; where rows run out, adds empty pieces."""
    while missing := count - (len(offsets) - 1):
        sizes = np.diff(offsets)
        cost = np.where(sizes > 1, sizes * widths_of(longer, offsets), 0)
        largest = np.argsort(-cost, kind="stable")[:missing]
        largest = largest[cost[largest] > 0]
        if not len(largest):
            return np.concatenate((offsets, np.full(missing, offsets[-1])))
        offsets = np.sort(np.concatenate((offsets, offsets[largest] + sizes[largest] // 2)))
    return offsets


def _step_order(cost: Rows, micro_batches: int, rng: np.random.Generator) -> Rows:
    """Deals micro-batches to steps at random; inside a step the most costly comes first, so that ranks that work side
    by side get like ones."""
    order = rng.permutation(len(cost)).reshape(-1, micro_batches)
    inside = np.argsort(-cost[order], axis=1, kind="stable")
    dealt: Rows = np.take_along_axis(order, inside, axis=1).reshape(-1)
    return dealt


def _take(rows: Rows, offsets: Rows, order: Rows) -> tuple[Rows, Rows]:
    sizes = np.diff(offsets)[order]
    return rows[positions_of(offsets[:-1][order], sizes)], starts_of(sizes)


def widths_of(lengths: Lengths, offsets: Rows) -> Rows:
    """[K]: longest row of each piece (lengths [N] in order, offsets [K + 1]), 0 for an empty one."""
    widths = np.zeros(len(offsets) - 1, dtype=np.int64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        widths[filled] = np.maximum.reduceat(lengths, offsets[:-1][filled])
    return widths
