"""The processes of a run and the device of each, as one object that is passed by hand."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_tfm.config.schema import LaunchConfig, ParallelConfig
from dist_tfm.errors import ConfigError, RunError
from dist_tfm.parallel.axis import Alone, Axis, ProcessAxis
from dist_tfm.parallel.collectives import Group, ProcessGroup, SingleProcess
from dist_tfm.parallel.environment import Ranks
from dist_tfm.parallel.grid import AxisName, Grid, Place


@dataclass(frozen=True)
class Axes:
    """This process's rows of the grid, over which tensors travel (over `Topology.backend`).

    tensor: the ranks that divide each layer; pipe: those that divide the layers; model: both together, so all that hold
    one replica of the model (pipe-major); data: those that hold the same part of the other replicas.
    """

    tensor: Axis
    pipe: Axis
    model: Axis
    data: Axis


@dataclass(frozen=True)
class Topology:
    """Who computes together. `world` and `data` are control groups over the CPU; tensors travel over `axes`.

    data: the ranks that share out a step's micro-batches, one of each replica of the model. The other ranks of a
    replica read the same micro-batches.
    """

    ranks: Ranks
    world: Group
    data: Group
    axes: Axes
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes what all ranks share."""
        return self.ranks.rank == 0

    @property
    def leads_replica(self) -> bool:
        """True on one rank of each replica: the one that counts what all ranks of a replica have alike."""
        return self.axes.model.rank == 0

    @property
    def grid(self) -> Grid:
        """The grid that the processes form."""
        return Grid(tp=self.axes.tensor.size, pp=self.axes.pipe.size, dp=self.data.size)


def start(ranks: Ranks, launch: LaunchConfig, report: Callable[[str], None] | None = None) -> Topology:
    """Joins the job: picks the device, starts torch.distributed (alone too: DeepSpeed needs it) and the groups.

    report: takes a line for the user, on rank 0 only (default: standard error).
    All processes are replicas until `arrange` lays them out. Raises ConfigError for a device that this host has not;
    RunError if the other processes were not met in launch.hang_timeout seconds. Call `shutdown` at the end.
    """
    device = choose_device(launch.device, ranks, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    _set_variables(ranks, device)
    timeout = timedelta(seconds=launch.hang_timeout)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if ranks.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        group: Group = SingleProcess()
    else:
        group = _join(ranks, backend, timeout)
    if ranks.rank == 0:
        asked = " (launch.device: auto)" if launch.device == "auto" else ""
        threads = f" with {torch.get_num_threads()} thread(s) each" if device.type == "cpu" else ""
        line = f"{ranks.world_size} process(es){threads} by {ranks.launcher}, on {device.type}{asked}, over {backend}"
        (report or _print_error)(line)
    alone = Alone(ranks.rank)
    world = dist.group.WORLD
    data = alone if world is None or ranks.world_size == 1 else ProcessAxis(world, range(ranks.world_size))
    axes = Axes(tensor=alone, pipe=alone, model=alone, data=data)
    return Topology(ranks=ranks, world=group, data=group, axes=axes, device=device, backend=backend)


def arrange(topology: Topology, parallel: ParallelConfig, launch: LaunchConfig) -> Topology:
    """The processes laid out as a grid of parallel.pp x replicas x parallel.tp; collective.

    All ranks must give the same `parallel`, checked before against the world's size (`config.layout.check_world`).
    """
    if parallel.tp == parallel.pp == 1:
        return topology
    grid = Grid.of(topology.ranks.world_size, parallel.tp, parallel.pp)
    timeout = timedelta(seconds=launch.hang_timeout)

    def row(axis: AxisName) -> ProcessAxis:
        return _row(topology, grid.rows(axis), timeout)

    # DeepSpeed wants a group of the replicas also where there is one.
    data, model = row("data"), row("model")
    alone = Alone(topology.ranks.rank)
    tensor = alone if grid.tp == 1 else model if grid.pp == 1 else row("tensor")
    pipe = alone if grid.pp == 1 else model if grid.tp == 1 else row("pipe")
    control = ProcessGroup(data.group) if data.size > 1 else SingleProcess()
    return replace(topology, data=control, axes=Axes(tensor=tensor, pipe=pipe, model=model, data=data))


def stages_axis(topology: Topology, stages: Sequence[int], launch: LaunchConfig) -> Axis | None:
    """The ranks of these pipeline stages, of all replicas, with this rank's place among tensor shards; None on the
    ranks of other stages. Collective over the world."""
    grid, rank = topology.grid, topology.ranks.rank
    rows = [
        [grid.rank(Place(pipe, data, tensor)) for pipe in stages for data in range(grid.dp)]
        for tensor in range(grid.tp)
    ]
    others = sorted(set(range(grid.size)).difference(*rows))
    axis = _row(topology, [*rows, *([others] if others else [])], timedelta(seconds=launch.hang_timeout))
    return None if rank in others else axis


def shutdown() -> None:
    """Leaves the job. Safe to call twice, and after a failure of another rank."""
    if dist.is_initialized():
        dist.destroy_process_group()


def describe_fault(fault: RuntimeError, ranks: Ranks) -> RunError | None:
    """A sentence for what torch raises when another process has gone or is silent, or when memory runs out; None for
    any other fault, which deserves its traceback."""
    text = str(fault)
    detail = text.splitlines()[0].split("] ", 1)[-1].partition(". ")[0] if text else type(fault).__name__
    if isinstance(fault, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return RunError(
            f"rank {ranks.rank} has too little memory ({detail}): lower data.batch_tokens, raise data.micro_batches, "
            "set train.activation_checkpointing=full or use a smaller model"
        )
    if (isinstance(fault, dist.DistError) or "gloo" in text) and any(sign in text for sign in _LOST):
        lost = RunError(
            f"rank {ranks.rank} lost another process of the job ({detail}): the output of that process says why; "
            "the same command goes on from the newest checkpoint"
        )
        lost.secondhand = True
        return lost
    return None


_LOST = ("Connection", "closed by peer", "Timed out", "timed out", "Broken pipe")


def choose_device(asked: str, ranks: Ranks, gpus: int) -> torch.device:
    """The device of this process: GPU number local_rank (its only one under srun --gpus-per-task), or the CPU.

    asked: launch.device; gpus: how many this process sees. Raises ConfigError where a GPU is asked for, or taken by
    `auto`, and there are fewer of them than processes on this host.
    """
    if asked == "cpu" or (asked == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise ConfigError(
            "launch.device: expected a CUDA device, found none that torch can use: "
            "set launch.device=cpu, or install a CUDA build of torch and its driver"
        )
    if gpus == 1 and ranks.launcher == "slurm":  # srun --gpus-per-task shows each task its own GPU, as number 0
        return torch.device("cuda", 0)
    if ranks.local_rank >= gpus:
        raise ConfigError(
            f"launch.device: expected a GPU for each of the {ranks.local_world_size} processes on this host, "
            f"found {gpus}: start fewer processes, or set launch.device=cpu"
        )
    return torch.device("cuda", ranks.local_rank)


def _join(ranks: Ranks, backend: str, timeout: timedelta) -> Group:
    try:
        dist.init_process_group(
            backend, init_method="env://", rank=ranks.rank, world_size=ranks.world_size, timeout=timeout
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as fault:  # torch's DistError family derives from RuntimeError
        meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        alone = RunError(
            f"rank {ranks.rank} did not meet the other {ranks.world_size - 1} process(es) at {meeting}: "
            f"check that all of them were started and that the port is free ({fault})"
        )
        alone.secondhand = True
        raise alone from fault
    assert control is not None  # a member of the group gets it
    return ProcessGroup(control)


def _row(topology: Topology, rows: Sequence[Sequence[int]], timeout: timedelta) -> ProcessAxis:
    """Makes the groups of all `rows` of ranks, in one order on every rank, and returns this rank's."""
    mine: ProcessAxis | None = None
    for members in rows:
        group = dist.new_group(members, backend=topology.backend, timeout=timeout)
        if topology.ranks.rank in members:
            assert group is not None  # a member of the group gets it
            mine = ProcessAxis(group, members)
    assert mine is not None  # every rank is in one row
    return mine


def _set_variables(ranks: Ranks, device: torch.device) -> None:
    """DeepSpeed reads these itself, also where the launcher (srun, none) does not set them."""
    os.environ["RANK"] = str(ranks.rank)
    # DeepSpeed takes LOCAL_RANK for the number of the GPU.
    os.environ["LOCAL_RANK"] = str(ranks.local_rank if device.index is None else device.index)
    os.environ["WORLD_SIZE"] = str(ranks.world_size)
    # On a CPU DeepSpeed takes LOCAL_SIZE for a number of devices, and builds a shared-memory extension for it.
    os.environ.pop("LOCAL_SIZE", None)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
