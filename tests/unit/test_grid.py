"""The grid of processes, and which combinations of parallelism a configuration may ask for."""

from dataclasses import replace

import pytest

from dist_tfm.config.layout import check_world, layout_faults
from dist_tfm.config.schema import Config, ModelConfig, ParallelConfig
from dist_tfm.errors import ConfigError
from dist_tfm.parallel.axis import Alone
from dist_tfm.parallel.grid import AxisName, Grid, Place

GRIDS = [(1, 1, 1), (4, 2, 1), (4, 1, 2), (8, 2, 2), (12, 2, 3), (8, 8, 1), (3, 1, 1)]
AXES: tuple[AxisName, ...] = ("tensor", "pipe", "data", "model")


def test_rank_is_pipe_then_data_then_tensor() -> None:
    grid = Grid.of(8, tp=2, pp=2)
    assert grid == Grid(tp=2, pp=2, dp=2)
    assert [grid.place(rank) for rank in (0, 1, 2, 4, 7)] == [
        Place(pipe=0, data=0, tensor=0),
        Place(pipe=0, data=0, tensor=1),
        Place(pipe=0, data=1, tensor=0),
        Place(pipe=1, data=0, tensor=0),
        Place(pipe=1, data=1, tensor=1),
    ]
    assert grid.rows("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.rows("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.rows("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.rows("model") == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(("world", "tp", "pp"), GRIDS)
def test_rows_of_each_axis_divide_the_world(world: int, tp: int, pp: int) -> None:
    grid = Grid.of(world, tp, pp)
    assert grid.size == world
    assert [grid.rank(grid.place(rank)) for rank in range(world)] == list(range(world))
    sizes = {"tensor": tp, "pipe": pp, "data": grid.dp, "model": tp * pp}
    for axis in AXES:
        rows = grid.rows(axis)
        assert sorted(rank for row in rows for rank in row) == list(range(world))
        assert {len(row) for row in rows} == {sizes[axis]}
        for row in rows:
            moved = [tuple(getattr(grid.place(rank), name) for name in Place._fields if name != axis) for rank in row]
            assert axis == "model" or len(set(moved)) == 1
            # A row is in the order of its axis; of a replica, the pipe comes first.
            assert row == sorted(row)


@pytest.mark.parametrize(("world", "tp", "pp"), [(4, 3, 1), (4, 2, 4), (2, 0, 1)])
def test_a_grid_that_does_not_fit_is_refused(world: int, tp: int, pp: int) -> None:
    with pytest.raises(ValueError, match="to divide"):
        Grid.of(world, tp, pp)


def test_an_axis_of_length_one_has_no_group() -> None:
    with pytest.raises(ValueError, match="no process group"):
        _ = Alone(3).group
    assert list(Alone(3).members) == [3]


MODEL = ModelConfig(heads=8, d_ff=2048)


def test_a_valid_combination_has_no_fault() -> None:
    assert layout_faults(MODEL, ParallelConfig(tp=1, zero_stage=3)) == []
    assert layout_faults(MODEL, ParallelConfig(tp=8, zero_stage=2)) == []
    assert layout_faults(MODEL, ParallelConfig(pp=12, zero_stage=1)) == []
    check_world(Config(), 3, 3)


@pytest.mark.parametrize(
    ("parallel", "world", "local", "expected", "nearest"),
    [
        (ParallelConfig(tp=2), 3, 3, "that 2 divides, found 3: start 4 processes", "tp=1 parallel.pp=1"),
        (ParallelConfig(tp=4), 6, 6, "that 4 divides, found 6: start 8 processes", "tp=2 parallel.pp=1"),
        (ParallelConfig(tp=4), 4, 2, "the 2 processes on each host", "tp=2 parallel.pp=1"),
    ],
)
def test_processes_that_cannot_be_laid_out_are_refused(
    parallel: ParallelConfig, world: int, local: int, expected: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_world(replace(Config(), parallel=parallel), world, local)
    assert expected in str(refused.value)
    assert f"nearest valid combination, parallel.{nearest}" in str(refused.value)


@pytest.mark.parametrize(
    ("model", "parallel", "expected", "nearest"),
    [
        (MODEL, ParallelConfig(tp=3), "model.heads=8, and of model.d_ff=2048, found 3", "parallel.tp=4"),
        (MODEL, ParallelConfig(tp=5), "found 5", "parallel.tp=4"),
        (ModelConfig(heads=8, kv_heads=2), ParallelConfig(tp=4), "model.kv_heads=2, and of", "parallel.tp=2"),
        (ModelConfig(heads=8, d_ff=36), ParallelConfig(tp=8), "found 8", "parallel.tp=4"),
        (
            MODEL,
            ParallelConfig(tp=2, zero_stage=3),
            "at most 2 together with tensor parallelism, found 3",
            "parallel.tp=2 parallel.pp=1 parallel.zero_stage=2",
        ),
        (
            MODEL,
            ParallelConfig(pp=13),
            "parallel.pp: expected at most one stage for each of the 12 layers, found 13",
            "parallel.tp=1 parallel.pp=12",
        ),
        (
            MODEL,
            ParallelConfig(tp=2, pp=2, zero_stage=2),
            "at most 1 together with pipeline parallelism, found 2",
            "parallel.tp=2 parallel.pp=2 parallel.zero_stage=1",
        ),
    ],
)
def test_invalid_combination_is_refused_with_the_nearest_valid_one(
    model: ModelConfig, parallel: ParallelConfig, expected: str, nearest: str
) -> None:
    (fault,) = layout_faults(model, parallel)
    assert expected in fault
    assert f"the nearest valid combination is {nearest}" in fault


@pytest.mark.parametrize(("world", "pp", "nearest"), [(3, 2, 3), (6, 4, 3), (8, 5, 4)])
def test_stages_that_do_not_divide_the_processes_are_refused(world: int, pp: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=f"that {pp} divides, found {world}: start .* parallel.pp={nearest} "):
        check_world(replace(Config(), parallel=ParallelConfig(pp=pp)), world, world)
