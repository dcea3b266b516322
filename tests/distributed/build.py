"""Builds the real engine for a recipe of the oracle, and reads its state back, inside one rank of a test world."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.api import Batch
from dist_tfm.config.schema import (
    Config,
    LaunchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)
from dist_tfm.engine.base import STATE_KINDS, LossSums
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine, Optimization
from dist_tfm.engine.fragments import base_optimizer, flat_tensors
from dist_tfm.kernels.native import Kernels
from dist_tfm.model.layers import LayerRunner
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.partition import StagePlan
from dist_tfm.parallel.topology import Topology, arrange
from dist_tfm.training.building import Sizes, stage_part, whole_part
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.schedule import rate_function
from tests.batches import share, step_batches, target_tokens
from tests.oracle import Recipe

MOMENTS = ("exp_avg", "exp_avg_sq")
RunnerFactory = Callable[[int, int], LayerRunner]


def build_engine(
    topology: Topology,
    stage: int,
    recipe: Recipe,
    checkpointing: bool = False,
    initial_seed: int | None = None,
    runner: RunnerFactory | None = None,
    wrap: Callable[[Any], nn.Module] | None = None,
    ema: float = 0.0,
    plan: StagePlan | None = None,
    kernels: Kernels | None = None,
) -> DeepSpeedEngine:
    """The engine as the training script builds it; plan: where a pipeline is cut, on a topology that has one.

    initial_seed: other initial weights than the recipe's. wrap, runner: what a test puts in place of the right ones.
    """
    config = as_config(recipe, stage, recipe.seed if initial_seed is None else initial_seed)

    def seeded(step: int, index: int) -> LayerRunner:
        return SeededRunner(recipe.seed, step, index, checkpointing)

    sizes = Sizes(recipe.vocabulary, None)
    if plan is None:
        part = whole_part(config, sizes, topology, runner or seeded)
    else:
        part = stage_part(config, sizes, plan, topology, runner or seeded)
    return DeepSpeedEngine(
        loss=wrap(part.module) if wrap else part.module,
        model=part.model,
        optimization=Optimization(
            groups=parameter_groups(part.model, config.optim),
            settings=config.optim,
            rate=rate_function(config.schedule, recipe.model.d_model),
            ema=ema,
            kernels=kernels,
        ),
        precision=config.precision,
        zero_stage=stage,
        topology=topology,
        passes=part.passes,
    )


def as_config(recipe: Recipe, stage: int, seed: int) -> Config:
    """The configuration that asks for what the recipe says."""
    return Config(
        model=recipe.model,
        train=TrainConfig(seed=seed, label_smoothing=recipe.smoothing),
        optim=OptimConfig(beta1=recipe.beta1, beta2=recipe.beta2, eps=recipe.eps, clip_norm=recipe.clip),
        schedule=ScheduleConfig(kind="noam", warmup=recipe.warmup, factor=recipe.factor),
        precision=PrecisionConfig(dtype="fp32" if recipe.precision == "fp32" else "bf16"),
        parallel=ParallelConfig(zero_stage=stage),
        launch=LaunchConfig(device="cpu", hang_timeout=60),
    )


def train_step(
    engine: DeepSpeedEngine,
    topology: Topology,
    recipe: Recipe,
    step: int,
    count: Callable[[Sequence[Batch]], int] | None = None,
) -> dict[str, Any]:
    """One step as the training loop takes it, and what it did, with the losses of all ranks.

    count: how this rank's micro-batches give the divisor, where a test wants a wrong one.
    """
    batches = step_batches(step, recipe.micro_batches)
    tokens = target_tokens(batches)
    mine = share(batches, topology.data.rank, topology.data.size)
    result = engine.train_batch(mine, step, tokens if count is None else count(mine))
    loss, nll, counted = topology.world.sum_floats([result.sums.loss, result.sums.nll, result.sums.target_tokens])
    assert counted == tokens
    return {
        "loss": loss / tokens,
        "nll": nll / tokens,
        "norm": result.grad_norm,
        "rate": result.learning_rate,
        "applied": result.applied,
    }


def train_steps(
    engine: DeepSpeedEngine, topology: Topology, recipe: Recipe, first: int, last: int
) -> list[dict[str, Any]]:
    return [train_step(engine, topology, recipe, step) for step in range(first, last + 1)]


@contextlib.contextmanager
def weighed(engine: DeepSpeedEngine) -> Iterator[dict[str, int]]:
    """Bytes that this rank holds, filled in by the step taken inside: weights, gradients before the update, and what
    `optimizer_bytes` counts."""
    held: dict[str, int] = {}
    step = engine._engine.step

    def weighing() -> None:
        # Of a backward pass, and where they are added up: in one place of both, or twice the memory.
        places = (
            g for p in engine._model.parameters() for g in (p.grad, getattr(p, "_hp_grad", None)) if g is not None
        )
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in places}
        held["gradients"] = sum(storages.values())
        step()

    with mock.patch.object(engine._engine, "step", weighing):
        yield held
    held["weights"] = sum(p.nbytes for p in engine._model.parameters())
    held["optimizer"] = optimizer_bytes(engine)


def optimizer_bytes(engine: DeepSpeedEngine) -> int:
    """Memory of masters and moments beside the weights (which are masters themselves in fp32 at stages 0 and 1), by the
    storages behind them."""
    state = base_optimizer(engine._engine).state
    tensors = [t for flat in flat_tensors(engine._engine) for t in (flat, *(state[flat][name] for name in MOMENTS))]
    # What DeepSpeed keeps views of is in memory too.
    mappings = (getattr(p, "_hp_mapping", None) for p in engine._model.parameters())
    tensors += [mapping.hp_fragment for mapping in mappings if mapping is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    weights = {p.untyped_storage().data_ptr() for p in engine._model.parameters()}
    return sum(size for place, size in storages.items() if place not in weights)


def gather_state(engine: DeepSpeedEngine, kinds: Sequence[str] = STATE_KINDS) -> dict[str, Tensor]:
    """Every parameter's master weight and moments, whole, as KIND/NAME, on every rank, put together from fragments.

    Asserts that each element comes from exactly one rank.
    """
    fragments = {f.tag.name: f for f in engine.fragments(divide=True) if f.tag.writer}
    shapes, rows = _shapes(engine._model.config, engine._model.vocab_size), len(kinds) + 1
    everything = torch.zeros(sum(rows * math.prod(shape) for shape in shapes.values()))
    parts = everything.split([rows * math.prod(shape) for shape in shapes.values()])
    wholes = {name: part.view(rows, *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    for name, fragment in fragments.items():
        tag = fragment.tag
        local = wholes[name].narrow(1 + tag.dim, tag.low, tag.high - tag.low)
        own = torch.zeros(rows, local[0].numel())
        place = slice(fragment.start, fragment.start + fragment.numel)
        for row, kind in zip(own, kinds, strict=False):
            row[place] = fragment.views[kind]
        own[-1, place] = 1
        local.copy_(own.view_as(local))
    dist.all_reduce(everything)  # once: a message costs more than what is in it
    for name, whole in wholes.items():
        assert bool((whole[-1] == 1).all()), f"{name} is not covered exactly once"
    return {f"{kind}/{name}": whole[k].clone() for name, whole in wholes.items() for k, kind in enumerate(kinds)}


def evaluate(engine: DeepSpeedEngine, topology: Topology, batch: Batch) -> LossSums:
    """What the ranks of one replica find for a batch that every replica evaluates."""
    sums = engine.evaluate(batch)
    loss, nll, tokens = topology.world.sum_floats([sums.loss, sums.nll, sums.target_tokens])
    replicas = topology.data.size
    return LossSums(loss / replicas, nll / replicas, int(tokens) // replicas)


def whole_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of the recipe's parameters."""
    return _shapes(recipe.model, recipe.vocabulary)


@cache
def _shapes(model: ModelConfig, vocabulary: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(model, vocabulary).named_parameters()}


@cache
def arranged(topology: Topology, tp: int, pp: int = 1) -> Topology:
    """The test world as a grid; its groups are made once."""
    return arrange(topology, ParallelConfig(tp=tp, pp=pp), LaunchConfig(hang_timeout=60))
