"""Which processes compute together: a grid of pipeline stages x replicas x tensor shards, as arithmetic on ranks.

rank = (pipe * dp + data) * tp + tensor: tensor-parallel ranks, which talk most, are neighbours (on one host), pipeline
stages, which talk least, are furthest apart.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

AxisName = Literal["tensor", "pipe", "data", "model"]
"""The three directions, and "model": all ranks that hold one replica of the model (tensor x pipe)."""


class Place(NamedTuple):
    """A process's coordinates."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """tp tensor shards, pp pipeline stages, dp replicas."""

    tp: int
    pp: int
    dp: int

    @classmethod
    def of(cls, world_size: int, tp: int, pp: int) -> "Grid":
        """The grid over all processes. Raises ValueError where tp x pp does not divide them."""
        if tp < 1 or pp < 1 or world_size % (tp * pp):
            raise ValueError(f"expected tp x pp to divide {world_size} processes, found {tp} x {pp}")
        return cls(tp=tp, pp=pp, dp=world_size // (tp * pp))

    def __str__(self) -> str:
        return f"{self.pp} pipeline stage(s) x {self.dp} replica(s) x {self.tp} tensor shard(s)"

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.dp

    def rank(self, place: Place) -> int:
        """World rank of the process at `place`."""
        return (place.pipe * self.dp + place.data) * self.tp + place.tensor

    def place(self, rank: int) -> Place:
        """Coordinates of world rank `rank`."""
        rest, tensor = divmod(rank, self.tp)
        pipe, data = divmod(rest, self.dp)
        return Place(pipe, data, tensor)

    def rows(self, axis: AxisName) -> list[list[int]]:
        """The world's ranks in groups that differ along `axis` alone, each in the axis's order; "model": pipe-major."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            pipe, data, tensor = self.place(rank)
            fixed = {"tensor": (pipe, data), "pipe": (data, tensor), "data": (pipe, tensor), "model": (data,)}[axis]
            rows.setdefault(fixed, []).append(rank)
        return list(rows.values())
