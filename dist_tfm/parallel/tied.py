"""Parameters that several pipeline stages hold: their gradients are summed over the holders, once a step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from dist_tfm.config.schema import LaunchConfig
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.partition import StagePlan
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology, stages_axis


class Tie(NamedTuple):
    """Parameters that the same stages hold. axis: these stages' ranks, of all replicas of the model."""

    axis: Axis
    parameters: Sequence[Tensor]


class TiedGradients:
    """Sums the gradients of tied parameters over all stages that hold them, and over replicas in the same go.

    first_replica: whether this rank belongs to the first replica. It keeps the sum and the others keep zeros, so that
    the engine's own sum over replicas changes no bit of it. Were replicas summed by the engine, each holder would do it
    in buckets of its own, in another order of additions, and the copies of one weight would drift apart.
    """

    def __init__(self, ties: Sequence[Tie], first_replica: bool) -> None:
        self._ties, self._first_replica = ties, first_replica

    def settle(self, gradient: Callable[[Tensor], Tensor]) -> None:
        """Collective; after the last backward pass of a step, before anything else reads gradients.

        gradient: the accumulated gradient of a parameter, in the memory where the engine reads it.
        """
        for tie in self._ties:
            for parameter in tie.parameters:
                mine = gradient(parameter)
                total = tie.axis.sum(mine)
                if self._first_replica:
                    mine.copy_(total)
                else:
                    mine.zero_()


def tie_parameters(model: nn.Module, plan: StagePlan, topology: Topology, launch: LaunchConfig) -> TiedGradients:
    """Ties the parameters of this rank's stage to their copies on other stages; collective over the world.

    model: the stage's part of the model, its parameters tagged.
    """
    ties = []
    for stages in plan.tied_stages:
        axis = stages_axis(topology, stages, launch)
        if axis is not None:
            ties.append(Tie(axis, [p for p in model.parameters() if plan.holders(tag_of(p).name) == stages]))
    return TiedGradients(ties, first_replica=topology.data.rank == 0)
