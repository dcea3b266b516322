"""Activation checkpointing of parts of layers and of every n-th layer under the engine."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dist_tfm.parallel.topology import Topology
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.recomputation import recomputation, recompute_inside
from tests.distributed.build import build_engine, gather_state, train_steps
from tests.oracle import Recipe

RECOMPUTED = ("attention", "feed_forward", "every_2")


def recomputing(topology: Topology, folder: Path, stage: int, recipe: Recipe) -> dict[str, Any]:
    """Two steps of each policy: whether losses, norms and the state at the end are those of keeping everything."""

    def train(policy: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        asked = recomputation(policy)

        def wrap(loss: nn.Module) -> nn.Module:
            recompute_inside(loss, asked.inside)
            return loss

        engine = build_engine(
            topology,
            stage,
            recipe,
            runner=lambda step, index: SeededRunner(recipe.seed, step, index, asked.layers),
            wrap=wrap,
        )
        steps, state = train_steps(engine, topology, recipe, 1, 2), gather_state(engine)
        engine.close()
        return steps, state

    steps, state = train("none")
    same = {}
    for policy in RECOMPUTED:
        found, end = train(policy)
        same[policy] = found == steps and all(torch.equal(end[key], value) for key, value in state.items())
    return {"same": same, "losses": [step["loss"] for step in steps]}
