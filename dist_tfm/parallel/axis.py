"""One direction of the grid of processes, over which tensors travel, with a twin for a direction of length one.

`Group` (collectives.py) carries records and counts over the CPU; an `Axis` carries tensors on the device they are on.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Axis(Protocol):
    """The ranks along one direction; every method is collective over them, in the same order.

    members: their world ranks, in the order of the axis; rank: this process's place among them.
    """

    rank: int
    size: int
    members: Sequence[int]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, for libraries that want one. Raises ValueError where the axis has none (`Alone`)."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Element-wise sum over the axis, in the tensor's dtype; the same bits on every rank. `tensor` is kept."""
        ...

    def maximum(self, tensor: Tensor) -> Tensor:
        """Element-wise maximum over the axis. `tensor` is kept."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of the axis; all have one shape and dtype."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor` (contiguous) with what rank `source` of the axis has in it."""
        ...


class Alone:
    """An axis of length one: nothing travels."""

    rank = 0
    size = 1

    def __init__(self, member: int = 0) -> None:
        self.members: Sequence[int] = (member,)

    @property
    def group(self) -> dist.ProcessGroup:
        raise ValueError("an axis of length one has no process group")

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor


class ProcessAxis:
    """An axis over a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self._group = group
        self.members = members
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    def sum(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def maximum(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return parts

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        dist.broadcast(tensor, self.members[source], group=self._group)
        return tensor

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        # A copy: autograd may hand one gradient to two consumers.
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, operation, group=self._group)
        return result
