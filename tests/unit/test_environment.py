"""Ranks from the variables of each launcher, and the device and cores that follow from them."""

import pytest

from dist_tfm.errors import ConfigError
from dist_tfm.parallel.environment import Ranks, cores_per_rank, read_ranks
from dist_tfm.parallel.topology import choose_device

MEETING = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
TORCHRUN = MEETING | {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = MEETING | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Ranks(0, 0, 1, 1, "single")),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, Ranks(0, 0, 1, 1, "accelerate")),
        (TORCHRUN, Ranks(5, 1, 8, 4, "torchrun")),
        (TORCHRUN | {"ACCELERATE_USE_DEEPSPEED": "true"}, Ranks(5, 1, 8, 4, "accelerate")),
        (
            MEETING | {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_SIZE": "2"},
            Ranks(2, 0, 4, 2, "deepspeed"),
        ),
        (MEETING | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 1, 2, 2, "environment")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 0, 1, 1, "environment")),
        (SLURM, Ranks(5, 1, 8, 4, "slurm")),
        # Plain Slurm variables, without a step number: MASTER_ADDR says that the tasks mean to meet.
        (without(SLURM, "SLURM_STEP_ID"), Ranks(5, 1, 8, 4, "slurm")),
        # A batch shell: one process, whatever the allocation is.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"},
            Ranks(0, 0, 1, 1, "single"),
        ),
        # A launcher inside a Slurm step wins over the step.
        (SLURM | TORCHRUN | {"RANK": "7", "LOCAL_RANK": "3"}, Ranks(7, 3, 8, 4, "torchrun")),
        (SLURM | {"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, Ranks(5, 1, 8, 2, "slurm")),
        (
            without(SLURM, "SLURM_STEP_TASKS_PER_NODE") | {"SLURM_NTASKS_PER_NODE": "4"},
            Ranks(5, 1, 8, 4, "slurm"),
        ),
        (without(SLURM, "SLURM_STEP_TASKS_PER_NODE") | {"SLURM_NNODES": "2"}, Ranks(5, 1, 8, 4, "slurm")),
        # srun -n 1 inside a larger allocation needs no meeting point.
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
            Ranks(0, 0, 1, 1, "slurm"),
        ),
    ],
)
def test_ranks_are_read(variables: dict[str, str], expected: Ranks) -> None:
    assert read_ranks(variables) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN | {"RANK": "8"}, "rank from 0 to 7, found 8"),
        (TORCHRUN | {"RANK": "-1"}, "rank from 0 to 7, found -1"),
        (TORCHRUN | {"RANK": "two"}, "RANK to be a whole number, found 'two'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "at least 1 process"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "found local rank 4, 4 processes on this host"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 processes on this host, world size 8"),
        (without(TORCHRUN, "RANK"), "expected RANK to be set beside WORLD_SIZE=8"),
        (without(TORCHRUN, "WORLD_SIZE"), "expected WORLD_SIZE to be set beside RANK=5"),
        (without(TORCHRUN, "LOCAL_RANK"), "expected LOCAL_RANK to be set"),
        (without(TORCHRUN, "MASTER_ADDR"), "expected MASTER_ADDR to say where the 8 processes meet"),
        (without(SLURM, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "found 70000"),
        (without(SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS or SLURM_STEP_NUM_TASKS"),
        (SLURM | {"SLURM_PROCID": "8"}, "found 8 (slurm)"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "found '4x2'"),
        (SLURM | {"SLURM_NODEID": "5"}, "an entry for node 5"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID"),
    ],
)
def test_contradictions_are_told_in_one_sentence(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_ranks(variables)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("ranks", "variables", "cores", "expected"),
    [
        (Ranks(0, 0, 1, 1, "single"), {"OMP_NUM_THREADS": "1"}, 16, 16),
        (Ranks(0, 0, 4, 4, "torchrun"), {}, 16, 4),
        (Ranks(0, 0, 3, 3, "torchrun"), {}, 16, 5),
        (Ranks(0, 0, 8, 8, "torchrun"), {}, 2, 1),
        (Ranks(0, 0, 8, 4, "slurm"), {"SLURM_CPUS_PER_TASK": "6"}, 6, 6),  # bound: the task sees its own cores only
        (Ranks(0, 0, 8, 4, "slurm"), {"SLURM_CPUS_PER_TASK": "6"}, 32, 6),
        (Ranks(0, 0, 8, 4, "slurm"), {"SLURM_CPUS_PER_TASK": "6"}, 3, 3),
        (Ranks(0, 0, 8, 4, "slurm"), {}, 32, 8),
    ],
)
def test_cores_are_shared_out(ranks: Ranks, variables: dict[str, str], cores: int, expected: int) -> None:
    assert cores_per_rank(ranks, variables, cores) == expected


@pytest.mark.parametrize(
    ("asked", "local_rank", "local_size", "launcher", "gpus", "expected"),
    [
        ("auto", 0, 1, "single", 0, "cpu"),
        ("auto", 2, 4, "torchrun", 4, "cuda:2"),
        ("cpu", 2, 4, "torchrun", 4, "cpu"),
        ("cuda", 3, 4, "torchrun", 8, "cuda:3"),
        ("cuda", 3, 4, "slurm", 1, "cuda:0"),  # --gpus-per-task: each task sees its own as number 0
    ],
)
def test_device_is_chosen(
    asked: str, local_rank: int, local_size: int, launcher: str, gpus: int, expected: str
) -> None:
    ranks = Ranks(local_rank, local_rank, local_size, local_size, launcher)
    assert str(choose_device(asked, ranks, gpus)) == expected


@pytest.mark.parametrize(
    ("asked", "local_rank", "gpus", "said"),
    [("cuda", 0, 0, "found none that torch can use"), ("cuda", 2, 2, "found 2"), ("auto", 2, 1, "found 1")],
)
def test_device_that_is_not_there_is_an_error(asked: str, local_rank: int, gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_device(asked, Ranks(local_rank, local_rank, 4, 4, "torchrun"), gpus)
