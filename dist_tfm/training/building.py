"""From a configuration to an engine: the model, or this rank's pipeline stage of it, its loss, and how they are run."""

from typing import NamedTuple

import torch
from torch import nn

from dist_tfm.config.schema import Config
from dist_tfm.engine.base import Engine
from dist_tfm.engine.deepspeed_engine import DeepSpeedEngine, Optimization
from dist_tfm.engine.passes import Passes, PipelinePasses, RunnerFactory, WholePasses
from dist_tfm.kernels.native import load_kernels
from dist_tfm.model.initialization import deep_norm_gain, initialize
from dist_tfm.model.layers import LayerRunner
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.links import ProcessLinks
from dist_tfm.parallel.partition import StagePlan, balanced_plan, describe_plan
from dist_tfm.parallel.pipeline import Pipeline
from dist_tfm.parallel.plan import divide
from dist_tfm.parallel.stages import Stage, cut_stage, mark_replicas
from dist_tfm.parallel.tied import tie_parameters
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.compilation import compile_layers
from dist_tfm.training.loss import StageLoss, TranslationLoss
from dist_tfm.training.native import NativeRowLoss, use_counted_dropout
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.recomputation import recomputation, recompute_inside
from dist_tfm.training.schedule import rate_function
from dist_tfm.training.smoothing import RowLoss, row_loss


class Sizes(NamedTuple):
    """Vocabulary sizes; source: None where both sides share one."""

    target: int
    source: int | None


class Part(NamedTuple):
    """What a rank trains: its part of the model, the module that an engine calls, and how it is called."""

    model: Transformer
    module: nn.Module
    passes: Passes


def build_engine(config: Config, vocab_size: int, topology: Topology, source_vocab_size: int | None = None) -> Engine:
    """The model with its initial weights, or this rank's part of it; its loss; the engine that trains them.

    vocab_size: of the target; source_vocab_size: if the source has a vocabulary of its own.
    """
    torch.set_float32_matmul_precision(config.precision.matmul)
    recomputed = recomputation(config.train.activation_checkpointing)

    def runner(step: int, index: int) -> LayerRunner:
        return SeededRunner(config.train.seed, step, index, recomputed.layers)

    plan = stage_plan(config, vocab_size)
    sizes = Sizes(vocab_size, source_vocab_size)
    kernels = load_kernels() if config.train.kernels == "native" else None
    of_rows = row_loss if kernels is None else NativeRowLoss(kernels)
    if plan is None:
        part = whole_part(config, sizes, topology, runner, of_rows)
    else:
        part = stage_part(config, sizes, plan, topology, runner, of_rows)
    if kernels is not None:
        use_counted_dropout(part.model, kernels)
    recompute_inside(part.model, recomputed.inside)
    if config.train.compile:
        compile_layers(part.model, topology.device)
    return DeepSpeedEngine(
        loss=part.module,
        model=part.model,
        optimization=Optimization(
            groups=parameter_groups(part.model, config.optim),
            settings=config.optim,
            rate=rate_function(config.schedule, config.model.d_model),
            ema=config.train.ema,
            kernels=kernels,
        ),
        precision=config.precision,
        zero_stage=config.parallel.zero_stage,
        topology=topology,
        passes=part.passes,
    )


def stage_plan(config: Config, vocab_size: int) -> StagePlan | None:
    """How the model is cut into pipeline stages; None where it is not."""
    if config.parallel.pp == 1:
        return None
    return balanced_plan(config.model, vocab_size, config.parallel.pp)


def describe_layout(config: Config, vocab_size: int, topology: Topology) -> list[str]:
    """Lines for the user: the grid of processes and the table of pipeline stages; none where all are replicas."""
    lines = []
    if (grid := topology.grid).dp < grid.size:
        lines.append(f"grid: {grid}")
    if (plan := stage_plan(config, vocab_size)) is not None:
        lines += describe_plan(plan, vocab_size, micro_batches=-(-config.data.micro_batches // grid.dp))
    return lines


def whole_part(
    config: Config, sizes: Sizes, topology: Topology, runner: RunnerFactory, of_rows: RowLoss = row_loss
) -> Part:
    """The whole model, or this rank's tensor shard of it."""
    model = Transformer(config.model, sizes.target, sizes.source)
    model.packed = config.data.packing
    initialize(model, config.train.seed, deep_norm_gain(config.model))
    tensor = topology.axes.tensor
    divide(model, tensor)
    return Part(model, TranslationLoss(model, config.train.label_smoothing, tensor, of_rows), WholePasses(runner))


def stage_part(
    config: Config,
    sizes: Sizes,
    plan: StagePlan,
    topology: Topology,
    runner: RunnerFactory,
    of_rows: RowLoss = row_loss,
) -> Part:
    """The stage of `plan` that is this rank's, or its tensor shard, with the weights that the whole model would have;
    collective."""
    number, tensor = topology.axes.pipe.rank, topology.axes.tensor
    model = cut_stage(plan, number, sizes.target, sizes.source)
    initialize(model, config.train.seed, deep_norm_gain(config.model))
    divide(model, tensor)
    mark_replicas(model, plan, number)
    stage = Stage(model, plan, number)
    rounded = config.precision.dtype == "bf16" and config.parallel.zero_stage > 0
    pipeline = Pipeline(
        plan,
        number,
        ProcessLinks(topology.axes.pipe, config.launch.hang_timeout, topology.device),
        topology.device,
        dtype=torch.bfloat16 if rounded else torch.float32,  # autocast (stage 0) leaves hidden states in fp32
    )
    tied = tie_parameters(model, plan, topology, config.launch)
    loss = TranslationLoss(model, config.train.label_smoothing, tensor, of_rows)
    return Part(model, StageLoss(loss, stage), PipelinePasses(pipeline, tied, runner))
