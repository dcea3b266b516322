"""How a pipeline stage reaches its neighbours: point-to-point messages of known shape, started and awaited together."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dist_tfm.errors import RunError
from dist_tfm.parallel.axis import Axis


class Message(NamedTuple):
    """A tensor to send, or to receive into, and the stage at the other end."""

    tensor: Tensor
    stage: int


class Links(Protocol):
    """A stage's connections. Both ends must give their messages to each other in the same order."""

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Sends and receives at the same time, and returns once all is done. Tensors are contiguous."""
        ...


class ProcessLinks:
    """Links over torch.distributed.

    axis: the pipe axis, whose ranks are the stages. patience: the seconds that its group waits (launch.hang_timeout).
    device: where messages are. Building it is collective over the axis.
    """

    def __init__(self, axis: Axis, patience: int, device: torch.device) -> None:
        self._axis, self._patience = axis, patience
        # NCCL connects a group in its first operation, in which all of its ranks must take part; messages have two.
        axis.sum(torch.zeros(1, device=device))

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """See `Links.exchange`. Raises RunError, naming the neighbour, if it ended, or was silent for
        launch.hang_timeout seconds."""
        members, group = self._axis.members, self._axis.group
        operations = [dist.P2POp(dist.isend, m.tensor, members[m.stage], group) for m in send]
        operations += [dist.P2POp(dist.irecv, m.tensor, members[m.stage], group) for m in receive]
        waited_for = [m.stage for m in (*send, *receive)]
        try:
            # One batch: NCCL lets its messages pass each other, which it does not for messages started one by one.
            for work in dist.batch_isend_irecv(operations):
                work.wait()
                waited_for = waited_for[1:] or waited_for
        except RuntimeError as fault:
            raise self._lost(waited_for[0], fault) from fault

    def _lost(self, stage: int, fault: RuntimeError) -> RunError:
        mine, theirs = (self._axis.members[place] for place in (self._axis.rank, stage))
        text = str(fault).splitlines()[0].split("] ", 1)[-1].partition(". ")[0]
        if "imed out" in text:
            text = f"it was silent for launch.hang_timeout={self._patience} s"
        lost = RunError(
            f"rank {mine} (pipeline stage {self._axis.rank}) had no answer from rank {theirs} (stage {stage}): {text}; "
            "the output of that rank says why; the same command goes on from the newest checkpoint"
        )
        lost.secondhand = True
        return lost
