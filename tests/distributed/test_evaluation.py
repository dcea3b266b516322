"""What `evaluate` and `plain_module` give, against the model run by hand on the gathered weights."""

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cases import evaluated_batch
from tests.distributed.plan import EVALUATED, Exact
from tests.distributed.world import Worlds
from tests.oracle import build_model, summed_loss

RUNS = [
    pytest.param(world, exact, id=f"{world}_ranks_{exact.name}") for world, runs in EVALUATED.items() for exact in runs
]


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_evaluation_and_plain_module_use_the_current_weights(worlds: Worlds, world: str, exact: Exact) -> None:
    name = f"evaluate_{exact.name}"
    results = worlds.results(world, name)
    tensors = load_file(worlds.folder / f"{world}_{name}.safetensors")
    model = build_model(exact.recipe).eval()
    model.load_state_dict({k.removeprefix("state/fp32/"): v for k, v in tensors.items() if k != "logits"})
    batch = evaluated_batch()
    with torch.no_grad():
        logits = model.logits(model(torch.from_numpy(batch.source), torch.from_numpy(batch.target_in)))
        loss, nll = summed_loss(logits, torch.from_numpy(batch.labels), exact.recipe.smoothing)
    tolerance = 1e-5 if exact.recipe.precision == "fp32" else 1e-2
    real = torch.from_numpy(batch.labels != 0)
    difference = (tensors["logits"] - logits)[real].norm() / logits[real].norm()
    assert float(difference) < tolerance
    for result in results:
        found_loss, found_nll, tokens = result["sums"][0]
        assert found_loss == pytest.approx(float(loss), rel=tolerance)
        assert found_nll == pytest.approx(float(nll), rel=tolerance)
        assert tokens == int(real.sum())
        assert result["logits"] == results[0]["logits"]  # bit for bit the same module on every rank
