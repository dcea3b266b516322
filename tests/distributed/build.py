"""Builds the real engine for a recipe of the oracle, and reads its state back, inside one rank of a test world."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.api import Batch
from dist_tfm.config.schema import LaunchConfig, OptimConfig, ParallelConfig, PrecisionConfig, ScheduleConfig
from dist_tfm.engine.base import STATE_KINDS, LossSums
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine
from dist_tfm.model.initialization import initialize
from dist_tfm.model.layers import LayerRunner
from dist_tfm.parallel.plan import divide
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology, arrange
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.schedule import rate_function
from tests.batches import share, step_batches, target_tokens
from tests.oracle import Recipe, build_model

RunnerFactory = Callable[[int, int], LayerRunner]


def build_engine(
    topology: Topology,
    stage: int,
    recipe: Recipe,
    checkpointing: bool = False,
    initial_seed: int | None = None,
    runner: RunnerFactory | None = None,
    wrap: Callable[[TranslationLoss], nn.Module] | None = None,
    ema: float = 0.0,
) -> DeepSpeedEngine:
    """The engine as the training script builds it.

    initial_seed: other initial weights than the recipe's. wrap, runner: what a test puts in place of the right ones.
    """
    model = build_model(recipe)
    if initial_seed is not None:
        initialize(model, initial_seed)
    divide(model, topology.axes.tensor)
    loss = TranslationLoss(model, recipe.smoothing, topology.axes.tensor)
    optim = OptimConfig(beta1=recipe.beta1, beta2=recipe.beta2, eps=recipe.eps, clip_norm=recipe.clip)
    schedule = ScheduleConfig(kind="noam", warmup=recipe.warmup, factor=recipe.factor)

    def seeded(step: int, index: int) -> LayerRunner:
        return SeededRunner(recipe.seed, step, index, checkpointing)

    return DeepSpeedEngine(
        loss=wrap(loss) if wrap else loss,
        model=model,
        groups=parameter_groups(model, optim),
        optim=optim,
        precision=PrecisionConfig(dtype="fp32" if recipe.precision == "fp32" else "bf16"),
        zero_stage=stage,
        topology=topology,
        rate=rate_function(schedule, recipe.model.d_model),
        runner=runner or seeded,
        ema=ema,
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


def gather_state(engine: DeepSpeedEngine, kinds: Sequence[str] = STATE_KINDS) -> dict[str, Tensor]:
    """Every parameter's master weight and moments, whole, as KIND/NAME, on every rank, put together from fragments.

    Asserts that each element comes from exactly one rank.
    """
    tags = [tag_of(parameter) for parameter in engine._model.parameters()]
    fragments = {fragment.tag.name: fragment for fragment in engine.fragments(divide=True)}
    state: dict[str, Tensor] = {}
    for tag in tags:
        whole = torch.zeros(len(kinds) + 1, *tag.shape)
        if tag.writer and (fragment := fragments.get(tag.name)) is not None:
            local = whole.narrow(1 + tag.dim, tag.low, tag.high - tag.low)
            rows = torch.zeros(len(kinds) + 1, local[0].numel())
            place = slice(fragment.start, fragment.start + fragment.numel)
            for row, kind in zip(rows, kinds, strict=False):
                row[place] = fragment.views[kind]
            rows[-1, place] = 1
            local.copy_(rows.view_as(local))
        dist.all_reduce(whole)
        assert bool((whole[-1] == 1).all()), f"{tag.name} is not covered exactly once"
        state |= {f"{kind}/{tag.name}": part for kind, part in zip(kinds, whole, strict=False)}
    return state


def evaluate(engine: DeepSpeedEngine, topology: Topology, batch: Batch) -> LossSums:
    """What the ranks of one replica find for a batch that every replica evaluates."""
    sums = engine.evaluate(batch)
    loss, nll, tokens = topology.world.sum_floats([sums.loss, sums.nll, sums.target_tokens])
    replicas = topology.data.size
    return LossSums(loss / replicas, nll / replicas, int(tokens) // replicas)


def whole_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in build_model(recipe).named_parameters()}


@cache
def arranged(topology: Topology, tp: int) -> Topology:
    """The test world as a grid; its groups are made once."""
    return arrange(topology, ParallelConfig(tp=tp), LaunchConfig(timeout=60))
