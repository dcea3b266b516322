"""How far a run is from the oracle: one comparison for the right engine and for the mutants."""

import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.batches import step_batches
from tests.oracle import Recipe, Trajectory, train


class Tolerance(NamedTuple):
    """Largest allowed relative differences. loss: of any step, loss and nll alike; norm: of any step's gradient norm;
    gradient, weights: norm of the difference over norm, of the worst tensor."""

    loss: float
    norm: float
    gradient: float
    weights: float


FP32_TOLERANCE = Tolerance(loss=1e-5, norm=1e-5, gradient=1e-5, weights=1e-5)

# bf16 keeps 8 bits (4e-3): two right programs that round in another order differ by that much in a gradient, and Adam
# turns a small gradient's rounding into whole updates of the biases, which start at 0. Losses stay close.
BF16_TOLERANCE = Tolerance(loss=2e-3, norm=3e-2, gradient=3e-2, weights=0.15)

# Tensor parallelism rounds each rank's part of a sum to bf16 before it adds them up, in every layer. Gradients of this
# recipe in bf16 are up to 0.062 away from those in fp32 on one process, and 0.064 from each other on one and on two.
BF16_TENSOR_TOLERANCE = BF16_TOLERANCE._replace(gradient=0.1)

TOLERANCES = {"fp32": FP32_TOLERANCE, "bf16": BF16_TOLERANCE, "bf16-autocast": BF16_TOLERANCE}


@cache
def oracle(recipe: Recipe) -> Trajectory:
    torch.set_num_threads(1)
    return train(recipe, lambda step: step_batches(step, recipe.micro_batches))


def measure(steps: list[dict[str, Any]], states: Path, recipe: Recipe) -> Tolerance:
    """The differences between a run (its step records and its state file) and the oracle's."""
    expected = oracle(recipe)
    assert len(steps) == recipe.steps
    state = load_file(states)
    weights = {name: state[f"last/fp32/{name}"] for name in expected.weights}
    losses = [("loss", expected.losses), ("nll", expected.nlls)]
    return Tolerance(
        loss=max(
            _relative(step[key], value) for key, values in losses for step, value in zip(steps, values, strict=True)
        ),
        norm=max(_relative(step["norm"], value) for step, value in zip(steps, expected.norms, strict=True)),
        gradient=gradient_difference(state, recipe),
        weights=_worst(weights, expected.weights),
    )


def gradient_difference(state: dict[str, Tensor], recipe: Recipe) -> float:
    """Between the gradient of a run's first step, in its state file, and the oracle's."""
    expected = oracle(recipe).gradients
    # After one step Adam's first moment is (1 - beta1) times the gradient, clipped.
    return _worst({name: state[f"first/exp_avg/{name}"] / (1 - recipe.beta1) for name in expected}, expected)


def _relative(found: float, expected: float) -> float:
    difference = abs(found - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(
        _relative(1.0 + float((found[name] - tensor).norm() / tensor.norm()), 1.0) for name, tensor in expected.items()
    )
