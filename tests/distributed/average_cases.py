"""The moving average of the weights, at every stage; each case runs on all ranks of a test world."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_tfm.checkpoint.restore import load_weights_only
from dist_tfm.checkpoint.snapshots import SnapshotStore
from dist_tfm.checkpoint.weights import read_weights
from dist_tfm.engine.base import STATE_KINDS
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.loss import TranslationLoss
from tests.distributed.build import build_engine, evaluate, gather_state, train_step
from tests.distributed.cases import SAVE_STEP, Poisoned, evaluated_batch, manager_of, native_kernels, save
from tests.oracle import Recipe, build_model

DECAY = 0.6
"""Reached at the 13th update; before that the decay is the smaller (1 + u) / (10 + u)."""

KINDS = (*STATE_KINDS, "ema")


def averaging(
    topology: Topology, folder: Path, name: str, stage: int, recipe: Recipe, native: bool = False
) -> dict[str, Any]:
    """Trains with an average, evaluates it between steps, checkpoints and snapshots it, skips a step."""
    poison: list[Poisoned] = []

    def wrap(loss: TranslationLoss) -> nn.Module:
        poison.append(Poisoned(loss))
        return poison[0]

    kernels = native_kernels(folder) if native else None
    engine = build_engine(topology, stage, recipe, wrap=wrap, ema=DECAY, kernels=kernels)
    expected = weights_of(gather_state(engine, KINDS), "fp32")
    steps, errors, evaluations = [], [], []
    for step in range(1, SAVE_STEP + 1):
        steps.append(train_step(engine, topology, recipe, step))
        state = gather_state(engine, KINDS)
        decay = min(DECAY, (1 + step) / (10 + step))
        for parameter, weight in weights_of(state, "fp32").items():
            expected[parameter] = decay * expected[parameter] + (1 - decay) * weight
        errors.append(distance(weights_of(state, "ema"), expected))
        if step in (1, SAVE_STEP):
            evaluations.append(evaluate_average(engine, topology, recipe, state))
    run = folder / f"average_{topology.world.size}_{name}"
    checkpoint = save(engine, manager_of(run, topology), SAVE_STEP, folder)
    snapshot = SnapshotStore(run, topology.world, 2, print).save(
        engine, SAVE_STEP, {}, "train: {}\n", folder / "tokenizer.model"
    )
    before = gather_state(engine, KINDS)
    poison[0].gradient_factor = math.nan
    skipped = train_step(engine, topology, recipe, SAVE_STEP + 1)
    after = gather_state(engine, KINDS)
    engine.close()
    return {
        "steps": steps,
        "errors": errors,
        "evaluations": evaluations,
        "skipped": not skipped["applied"],
        "untouched": all(torch.equal(before[key], after[key]) for key in before),
        "stored": same(read_weights(checkpoint, "ema"), before, "ema"),
        "snapshot": same(read_weights(snapshot), before, "fp32"),
        "snapshot_keys": sorted({key.split("/")[0] for key in stored_keys(snapshot)}),
    }


def evaluate_average(
    engine: DeepSpeedEngine, topology: Topology, recipe: Recipe, state: dict[str, Tensor]
) -> dict[str, Any]:
    """The held-out nll of the average by the engine and by a plain model; and what it left behind."""
    batch = evaluated_batch()
    trained = evaluate(engine, topology, batch)
    with engine.averaged_weights():
        averaged = evaluate(engine, topology, batch)
    again = evaluate(engine, topology, batch)
    after = gather_state(engine, KINDS)
    loss = TranslationLoss(build_model(recipe), recipe.smoothing).eval()
    loss.model.load_state_dict({name: weight.float() for name, weight in weights_of(state, "ema").items()})
    with torch.no_grad():
        inputs = (torch.from_numpy(array) for array in (batch.source, batch.target_in, batch.labels))
        plain = float(loss(*inputs)[1])
    return {
        "trained": trained.nll,
        "averaged": averaged.nll,
        "plain": plain,
        "undisturbed": trained == again and all(torch.equal(state[key], after[key]) for key in state),
    }


def loading(topology: Topology, folder: Path, source: int, written: str, stage: int, recipe: Recipe) -> dict[str, Any]:
    """Loads the checkpoint of a run with an average into another layout; starts a new run from its weights."""
    run = folder / f"average_{source}_{written}"
    engine = build_engine(topology, stage, recipe, initial_seed=99, ema=DECAY)
    manager = manager_of(run, topology)
    checkpoint = manager.newest_valid()
    assert checkpoint is not None
    manager.load(checkpoint, engine)
    state = gather_state(engine, KINDS)
    restored = same(read_weights(checkpoint, "ema"), state, "ema") and same(read_weights(checkpoint), state, "fp32")
    distinct = not same(read_weights(checkpoint, "ema"), state, "fp32")
    load_weights_only(run, engine, topology.world)
    state = gather_state(engine, KINDS)
    engine.close()
    return {
        "restored": restored,
        "distinct": distinct,
        "starts_at_the_weights": same(read_weights(checkpoint), state, "ema"),
    }


def weights_of(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Name to tensor in double precision."""
    prefix = f"{kind}/"
    return {key.removeprefix(prefix): value.double() for key, value in state.items() if key.startswith(prefix)}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative distance of a tensor from what it should be, in norm."""
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def same(stored: dict[str, Tensor], state: dict[str, Tensor], kind: str) -> bool:
    return all(torch.equal(tensor, state[f"{kind}/{name}"]) for name, tensor in stored.items())


def stored_keys(checkpoint: Path) -> list[str]:
    from safetensors import safe_open

    keys: list[str] = []
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            keys += file.keys()
    return keys
