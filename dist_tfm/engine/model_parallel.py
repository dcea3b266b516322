"""What DeepSpeed must know of model parallelism: its groups, and which parameters count in the global gradient norm."""

from torch import nn
from torch.distributed import ProcessGroup

from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology


class ModelParallelUnit:
    """The `mpu` of deepspeed.initialize. With it ZeRO divides state over the data axis alone, and gradient norms and
    overflow are global over the model axis too (tensor x pipe)."""

    def __init__(self, topology: Topology) -> None:
        self._axes = topology.axes

    def get_model_parallel_rank(self) -> int:
        return self._axes.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self._axes.model.size

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._axes.model.group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._axes.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._axes.tensor.size

    def get_data_parallel_rank(self) -> int:
        return self._axes.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._axes.data.size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._axes.data.group


def mark_counted(model: nn.Module) -> None:
    """Says in DeepSpeed's own words that just those parameters count whose tag names this rank as the writer.

    DeepSpeed leaves out replicas of pipeline stages, and on tensor ranks other than 0 everything that is not marked as
    divided. Marking everything as divided leaves the one decision to `ds_pipe_replicated`.
    """
    for parameter in model.parameters():
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = not tag_of(parameter).writer  # type: ignore[attr-defined]
