"""train.ema: the moving average of the weights on any layout, and the snapshots of weights alone."""

import pytest

from tests.distributed.cases import SAVE_STEP
from tests.distributed.plan import AVERAGED, AVERAGES_LOADED, Exact
from tests.distributed.world import Worlds

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases

RUNS = [pytest.param(world, e, id=f"{world}_ranks_{e.name}") for world, runs in AVERAGED.items() for e in runs]
LOADED = [(world, *load) for world, loads in AVERAGES_LOADED.items() for load in loads]


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_average_is_the_documented_one_and_disturbs_nothing(worlds: Worlds, world: str, exact: Exact) -> None:
    without = worlds.results(world, exact.name)[0]["steps"][:SAVE_STEP]
    for result in worlds.results(world, f"average_{exact.name}"):
        # The same floats as the run without an average, which was evaluated and swapped in after each step.
        assert result["steps"] == without
        assert max(result["errors"]) < 1e-6
        for evaluation in result["evaluations"]:
            assert evaluation["undisturbed"]
            tolerance = 1e-5 if exact.recipe.precision == "fp32" else 1e-2
            assert evaluation["averaged"] == pytest.approx(evaluation["plain"], rel=tolerance)
        last = result["evaluations"][-1]
        assert abs(last["averaged"] - last["trained"]) > 3e-4 * last["trained"], "the average is not the weights"


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_average_takes_no_skipped_step_in_and_is_stored(worlds: Worlds, world: str, exact: Exact) -> None:
    for result in worlds.results(world, f"average_{exact.name}"):
        assert result["skipped"]
        assert result["untouched"]
        assert result["stored"]
        assert result["snapshot"]
        assert result["snapshot_keys"] == ["fp32"]


@pytest.mark.parametrize(("world", "source", "written", "stage"), LOADED)
def test_average_loads_into_another_layout(worlds: Worlds, world: str, source: int, written: Exact, stage: int) -> None:
    for result in worlds.results(world, f"average_load_{source}_{written.name}_stage{stage}"):
        assert result == {"restored": True, "distinct": True, "starts_at_the_weights": True}
