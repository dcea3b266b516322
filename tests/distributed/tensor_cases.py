"""Cases of tensor parallelism alone; each runs on all ranks of a test world laid out with tp > 1."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dist_tfm.engine import gathering, model_parallel
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.parallel import layers
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology
from tests.distributed.build import build_engine, evaluate, train_steps, weighed
from tests.distributed.cases import evaluated_batch
from tests.distributed.checkpoint_cases import caught
from tests.oracle import Recipe


def held_bytes(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """What this rank holds at ZeRO stage 1, and the shapes of its weights."""
    engine = build_engine(topology, 1, recipe)
    with weighed(engine) as held:
        train_steps(engine, topology, recipe, 1, 1)
    result = {
        **held,
        "shapes": {tag_of(p).name: list(p.shape) for p in engine._model.parameters()},
        "ranks": [topology.axes.tensor.size, topology.data.size],
    }
    engine.close()
    return result


def dropping(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Attention dropout, which is drawn inside divided regions: run twice, recomputed, and without it."""
    runs = []
    for given, checkpointing in (
        (recipe, False),
        (recipe, False),
        (recipe, True),
        (replace(recipe, attention_dropout=0.0), False),
    ):
        engine = build_engine(topology, 1, given, checkpointing)
        steps = train_steps(engine, topology, given, 1, 3)
        runs.append([step["loss"] for step in steps])
        same = replicas_agree(engine, topology)
        engine.close()
    return {"losses": runs, "replicas_agree": same}


def replicas_agree(engine: DeepSpeedEngine, topology: Topology) -> bool:
    """Whether the weights that every tensor-parallel rank holds whole are the same, bit for bit."""
    whole = [p.detach().reshape(-1) for p in engine._model.parameters() if tag_of(p).whole]
    parts = topology.axes.tensor.gather(torch.cat(whole))
    return len(whole) > 10 and all(torch.equal(part, parts[0]) for part in parts)


def mutants(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """First losses and norms of deliberately wrong engines: what the comparison with the oracle would see."""

    def forgets(x: Tensor, axis: Any) -> Tensor:
        return x

    def everything_counts(model: Any) -> None:
        for parameter in model.parameters():
            parameter.tensor_model_parallel, parameter.ds_pipe_replicated = True, False

    faults: dict[str, Any] = {
        "all_reduce_forgotten_forward": lambda: mock.patch.object(layers, "leave", forgets),
        "all_reduce_forgotten_backward": lambda: mock.patch.object(layers, "enter", forgets),
        "replicas_counted_twice": lambda: mock.patch(
            "dist_tfm.engine.deepspeed_engine.mark_counted", everything_counts
        ),
        "none": lambda: mock.patch.object(model_parallel, "mark_counted", model_parallel.mark_counted),
    }
    found = {}
    for name, fault in faults.items():
        with fault():
            engine = build_engine(topology, 1, recipe)
            found[name] = train_steps(engine, topology, recipe, 1, 2)
            engine.close()
    return found


def too_large(topology: Topology, folder: Path, recipe: Recipe) -> dict[str, Any]:
    """A whole model does not fit on the last rank alone: all say so, the loss is still there; then there is room."""
    engine = build_engine(topology, 1, recipe)
    last = topology.world.rank == topology.world.size - 1
    with mock.patch.object(gathering, "available_bytes", return_value=1000 if last else None):
        error = caught(engine.plain_module)
    loss = evaluate(engine, topology, evaluated_batch()).loss
    train_steps(engine, topology, recipe, 1, 1)
    fits = sum(p.numel() for p in engine.plain_module().parameters())
    engine.close()
    return {"error": error, "loss_is_there": math.isfinite(loss) and loss > 0, "parameters": fits}
