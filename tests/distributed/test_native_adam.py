"""Adam as a compiled kernel under every ZeRO stage, on one rank and on two, beside torch's Adam in the same runs."""

import pytest
import torch
from safetensors.torch import load_file

from tests.compiler import require_compiler
from tests.distributed.cases import SAVE_STEP
from tests.distributed.compare import measure
from tests.distributed.plan import NATIVE, NATIVE_AVERAGED, Exact
from tests.distributed.test_oracle import tolerance_of, within
from tests.distributed.world import Worlds

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases

RUNS = [pytest.param(world, e, id=f"{world}_ranks_{e.name}") for world, runs in NATIVE.items() for e in runs]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    require_compiler()


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_a_run_is_the_one_with_torchs_adam(worlds: Worlds, world: str, exact: Exact) -> None:
    plain = exact._replace(native=False).name
    by_rank, torchs = worlds.results(world, exact.name), worlds.results(world, plain)
    # The same losses and gradients until the first update; an update that differs by rounding alone.
    assert by_rank[0]["steps"][0] == torchs[0]["steps"][0]
    files = [load_file(worlds.folder / f"{world}_{name}.safetensors") for name in (exact.name, plain)]
    found, expected = ({key: value for key, value in file.items() if key.startswith("first/")} for file in files)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    difference = measure(by_rank[0]["steps"], worlds.folder / f"{world}_{exact.name}.safetensors", exact.recipe)
    assert within(difference, tolerance_of(exact)), difference
    assert by_rank[0]["facts"]["updates"] == exact.recipe.steps
    assert all(result["steps"] == by_rank[0]["steps"] and result["rounded"] for result in by_rank)


def test_the_copies_are_made_anew_when_masters_change_without_an_update(worlds: Worlds) -> None:
    """Masters are swapped with their average and back: bf16 weights that an update left there would be found."""
    (exact,) = NATIVE_AVERAGED["1"]
    assert (exact.stage, exact.recipe.precision) == (1, "bf16")
    (result,) = worlds.results("1", f"average_{exact.name}")
    assert result["steps"] == worlds.results("1", exact.name)[0]["steps"][:SAVE_STEP]
    assert max(result["errors"]) < 1e-6
    for evaluation in result["evaluations"]:
        assert evaluation["undisturbed"]
        assert evaluation["averaged"] == pytest.approx(evaluation["plain"], rel=1e-2)
    last = result["evaluations"][-1]
    assert abs(last["averaged"] - last["trained"]) > 3e-4 * last["trained"], "the average is not the weights"
    assert result["skipped"]
    assert result["untouched"]
    assert result["stored"]
    assert result["snapshot"]
