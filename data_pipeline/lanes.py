"""Lanes: who reads what. A step's micro-batch i comes from lane i mod L, so a rank reads only the lanes that it serves.

With L = dp data-parallel ranks every lane has one reader, and no byte is read twice. What a step holds depends on L,
never on the ranks: lanes are part of the data order.
"""

from collections.abc import Iterator


def lanes_served(rank: int, dp: int, micro_batches: int, lanes: int) -> frozenset[int]:
    """The lanes of the micro-batches rank, rank + dp, ... of a step."""
    return frozenset(index % lanes for index in range(rank, micro_batches, dp))


def times_read(dp: int, micro_batches: int, lanes: int) -> float:
    """How many of the dp ranks read each byte of the shards, on average over the lanes: at least 1."""
    return sum(len(lanes_served(rank, dp, micro_batches, lanes)) for rank in range(dp)) / lanes


def lanes_read_once(dp: int, micro_batches: int) -> int:
    """The fewest lanes with which no byte is read twice. M lanes always do, and lanes must divide M."""
    return next(lanes for lanes in divisors(micro_batches) if times_read(dp, micro_batches, lanes) == 1)


def lanes_filled(lanes: int, blocks: int) -> int:
    """The lanes that a corpus of so many blocks is dealt to: all of them or, where blocks are fewer, as many as divide
    `lanes` and get a block each."""
    return max(count for count in divisors(lanes) if count <= max(1, blocks))


def divisors(number: int) -> Iterator[int]:
    """All divisors of a positive number, ascending."""
    return (count for count in range(1, number + 1) if number % count == 0)
