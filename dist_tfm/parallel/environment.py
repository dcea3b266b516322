"""Which process of the job this is, read from the variables that launchers set.

One pure function of a mapping of variables serves every way to start: torchrun, accelerate launch, the deepspeed
launcher, plain RANK / WORLD_SIZE / LOCAL_RANK variables, srun, or no launcher at all.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dist_tfm.errors import ConfigError, DistTfmError


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. `launcher` names who set it: torchrun, accelerate, deepspeed, environment, slurm
    or single (no launcher)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str


def read_ranks(variables: Mapping[str, str]) -> Ranks:
    """Finds out rank and world size: launchers' variables first, then those of a Slurm step, else one process.

    A Slurm batch script that runs Python without srun (no SLURM_STEP_ID and no MASTER_ADDR) is one process, whatever
    the allocation's SLURM_NTASKS says.

    Raises ConfigError for variables that contradict each other, and where several processes have no MASTER_ADDR and
    MASTER_PORT to meet at.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        ranks = _from_launcher(variables)
    elif "SLURM_PROCID" in variables and ("SLURM_STEP_ID" in variables or "MASTER_ADDR" in variables):
        ranks = _from_slurm(variables)
    else:
        launcher = "accelerate" if _set_by_accelerate(variables) else "single"
        return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher=launcher)
    _check(ranks, variables)
    return ranks


def speaks_for_all(error: DistTfmError) -> bool:
    """Whether this process should print `error`: one that all ranks share is printed by the first."""
    return not error.shared or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def cores_per_rank(ranks: Ranks, variables: Mapping[str, str], cores: int | None = None) -> int:
    """CPU cores that one process may keep busy: its own where Slurm counted them, else an equal share of the host's.

    cores: how many this process may run on; None asks the operating system. Launchers export OMP_NUM_THREADS=1, which
    is no answer to this question, so it is not read.
    """
    visible = len(os.sched_getaffinity(0)) if cores is None else cores
    if ranks.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in variables:
        return max(1, min(visible, _integer(variables, "SLURM_CPUS_PER_TASK")))
    return max(1, visible // ranks.local_world_size)


def _from_launcher(variables: Mapping[str, str]) -> Ranks:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in variables:
            raise ConfigError(
                f"expected {name} to be set beside {other}={variables[other]}, found it unset: "
                f"set both (a launcher such as torchrun does), or unset {other} to run one process"
            )
    world_size = _integer(variables, "WORLD_SIZE")
    if "LOCAL_RANK" not in variables and world_size > 1:
        raise ConfigError(
            f"expected LOCAL_RANK to be set beside RANK and WORLD_SIZE={world_size}, found it unset: "
            "set it to this process's number on its host (a launcher such as torchrun does)"
        )
    local_rank = _integer(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else 0
    # torchrun and accelerate say LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE; without either: one host.
    local_name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in variables), "WORLD_SIZE")
    return Ranks(
        rank=_integer(variables, "RANK"),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_integer(variables, local_name),
        launcher=_launcher(variables),
    )


def _from_slurm(variables: Mapping[str, str]) -> Ranks:
    total = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in variables), None)
    if total is None:
        raise ConfigError(
            "expected SLURM_NTASKS or SLURM_STEP_NUM_TASKS to be set beside SLURM_PROCID, found neither: "
            "start the program with srun, or unset SLURM_PROCID to run one process"
        )
    world_size = _integer(variables, total)
    return Ranks(
        rank=_integer(variables, "SLURM_PROCID"),
        local_rank=_integer(variables, "SLURM_LOCALID") if "SLURM_LOCALID" in variables or world_size > 1 else 0,
        world_size=world_size,
        local_world_size=_slurm_tasks_here(variables, world_size),
        launcher="slurm",
    )


def _slurm_tasks_here(variables: Mapping[str, str], world_size: int) -> int:
    """Tasks of the step on this node. Slurm writes a list such as "4(x2),3": four tasks on two nodes, three on one."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in variables:
            counts: list[int] = []
            for item in variables[name].split(","):
                match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
                if match is None:
                    raise ConfigError(f"expected {name} to look like 4(x2),3, found {variables[name]!r}")
                counts += [int(match[1])] * int(match[2] or 1)
            node = _integer(variables, "SLURM_NODEID") if "SLURM_NODEID" in variables else 0
            if node >= len(counts):
                raise ConfigError(f"expected {name} to have an entry for node {node}, found {variables[name]!r}")
            return counts[node]
    if "SLURM_NTASKS_PER_NODE" in variables:
        return min(world_size, _integer(variables, "SLURM_NTASKS_PER_NODE"))
    nodes = next((n for n in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if n in variables), None)
    return -(-world_size // max(1, _integer(variables, nodes))) if nodes else world_size


def _check(ranks: Ranks, variables: Mapping[str, str]) -> None:
    if ranks.world_size < 1:
        raise ConfigError(f"expected a world of at least 1 process, found {ranks.world_size} ({ranks.launcher})")
    if not 0 <= ranks.rank < ranks.world_size:
        raise ConfigError(
            f"expected a rank from 0 to {ranks.world_size - 1}, found {ranks.rank} ({ranks.launcher}): "
            "RANK (SLURM_PROCID) must be less than WORLD_SIZE (SLURM_NTASKS)"
        )
    if not 1 <= ranks.local_world_size <= ranks.world_size or not 0 <= ranks.local_rank < ranks.local_world_size:
        raise ConfigError(
            f"expected local rank < processes on this host <= world size, found local rank {ranks.local_rank}, "
            f"{ranks.local_world_size} processes on this host, world size {ranks.world_size} ({ranks.launcher})"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if ranks.world_size > 1 and missing:
        raise ConfigError(
            f"expected {' and '.join(missing)} to say where the {ranks.world_size} processes meet, found nothing: "
            "export the first host's name and a free port, the same on every process"
        )
    if ranks.world_size > 1:
        port = _integer(variables, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"expected MASTER_PORT to be a port from 1 to 65535, found {port}")


def _launcher(variables: Mapping[str, str]) -> str:
    if _set_by_accelerate(variables):
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    # The deepspeed launcher is the one that counts hosts in CROSS_SIZE.
    return "deepspeed" if "CROSS_SIZE" in variables else "environment"


def _set_by_accelerate(variables: Mapping[str, str]) -> bool:
    return any(name.startswith("ACCELERATE_") for name in variables)


def _integer(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None or not re.fullmatch(r"-?\d+", text.strip()):
        raise ConfigError(f"expected the variable {name} to be a whole number, found {text!r}")
    return int(text)
