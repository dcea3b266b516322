"""The engine on DeepSpeed ZeRO 0 to 3, exact on any number of ranks. The only module that imports deepspeed.

Losses come as sums over real target tokens. Each is divided by the step's global number of them before its backward
pass, and gradients are summed over ranks: neither padding, raggedness, the number of ranks nor the micro-batches that
fill a short round change a step.
"""

import contextlib
import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_pipeline.api import Batch
from dist_tfm.config.schema import OptimConfig, PrecisionConfig
from dist_tfm.engine.base import EngineFacts, Fragment, LossSums, StepResult
from dist_tfm.engine.ds_config import deepspeed_config
from dist_tfm.engine.eager_adam import EagerAdamW, Update
from dist_tfm.engine.flat_gradients import FlatGradients
from dist_tfm.engine.fp32_partitions import Fp32Partitions
from dist_tfm.engine.fragments import (
    accumulated_gradient,
    base_optimizer,
    create_state,
    flat_tensors,
    list_fragments,
    refresh_weights,
    set_masters,
    set_step,
)
from dist_tfm.engine.gathering import check_fit, gather_module
from dist_tfm.engine.guarded_adam import GuardedAdam
from dist_tfm.engine.model_parallel import ModelParallelUnit, mark_counted
from dist_tfm.engine.moving_average import MovingAverage
from dist_tfm.engine.native_adam import NativeUpdate, UpdatedCopies
from dist_tfm.engine.passes import Computation, Passes
from dist_tfm.errors import RunError
from dist_tfm.kernels.dropout import CountedDropout
from dist_tfm.kernels.native import Kernels
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.tags import tag_of, tag_parameters
from dist_tfm.parallel.topology import Topology

Rate = Callable[[int], float]
"""Learning rate of an optimizer update, counted from 1."""


class Optimization(NamedTuple):
    """How weights are updated.

    groups: the optimizer's parameter groups, each with a `name` and its `weight_decay`.
    settings: of Adam, and the bound of the gradient's norm.
    rate: learning rate by update; it is set by hand before each update, there is no other schedule.
    ema: decay of a moving average of the master weights; 0 keeps none.
    kernels: compiled ones, of which Adam's takes the place of torch's; None for torch's.
    """

    groups: list[dict[str, Any]]
    settings: OptimConfig
    rate: Rate
    ema: float = 0.0
    kernels: Kernels | None = None


class DeepSpeedEngine:
    """Implements `dist_tfm.engine.base.Engine`. Build it on every rank with the same weights; then use it collectively.

    model: whole, or the part of this rank's tensor shard (`parallel.plan.divide`) and pipeline stage
        (`parallel.stages.cut_stage`).
    loss: what `passes` takes micro-batches through. It holds `model` and no other parameter.
    passes: how the micro-batches of a step go forward and backward, and what comes out.

    Raises RunError where what DeepSpeed built is not what was asked for.
    """

    def __init__(
        self,
        loss: nn.Module,
        model: Transformer,
        optimization: Optimization,
        precision: PrecisionConfig,
        zero_stage: int,
        topology: Topology,
        passes: Passes,
    ) -> None:
        deepspeed = import_deepspeed(topology.device)
        self.updates = 0
        self._loss, self._model, self._topology = loss, model, topology
        self._rate, self._passes = optimization.rate, passes
        tag_parameters(model)
        loss.to(topology.device)
        self._partitioned = zero_stage == 3
        # ZeRO-3 replaces this function in the whole process; close() then puts it back.
        self._linear = nn.functional.linear
        update = None if optimization.kernels is None else NativeUpdate(optimization.kernels)
        adam = _build_adam(optimization, update, zero_stage, topology)
        config = deepspeed_config(zero_stage, precision, optimization.settings)
        rounds = precision.dtype != "fp32" and zero_stage > 0
        exact = {tag_of(p).name: p.detach().clone() for p in model.parameters()} if rounds else None
        unit = ModelParallelUnit(topology) if topology.axes.model.size > 1 else None
        if unit is not None:
            mark_counted(model)
        deepspeed.utils.groups.mpu = None  # DeepSpeed keeps the last engine's for ever
        with contextlib.redirect_stdout(io.StringIO()):  # it prints memory tables there; errors are raised
            self._engine: Any = deepspeed.initialize(model=loss, optimizer=adam, config=config, mpu=unit)[0]
        if zero_stage == 0 and topology.data.size == 1:
            self._engine.enable_backward_allreduce = False  # it would copy every gradient to reduce nothing
        self._flat: FlatGradients | None = None
        if FlatGradients.fits(self._engine.optimizer):
            self._flat = FlatGradients(self._engine.optimizer)
            self._engine.enable_backward_allreduce = False
        if Fp32Partitions.fits(self._engine.optimizer, zero_stage):
            Fp32Partitions(self._engine.optimizer)
        if update is not None and UpdatedCopies.fits(self._engine.optimizer, topology.data.size):
            UpdatedCopies(self._engine.optimizer, update)
        create_state(self._engine)
        if exact is not None:
            # DeepSpeed makes fp32 masters from weights that it has rounded before.
            set_masters(list_fragments(self._engine, 0, 1, divide=False), exact)
            refresh_weights(self._engine)
        decay = optimization.ema
        self._average = MovingAverage(flat_tensors(self._engine), decay) if decay else None
        self.facts = _read_facts(self._engine, model, topology)
        _check_facts(self.facts, precision, zero_stage, topology, self._engine)

    def train_batch(self, micro_batches: Sequence[Batch], step: int, global_target_tokens: int) -> StepResult:
        """See `Engine.train_batch`. Every rank gives the same number of micro-batches and the same token count."""
        if global_target_tokens < 1 or not micro_batches:
            raise ValueError(f"expected micro-batches with target tokens, found {global_target_tokens} tokens")
        engine = self._engine
        if not self._loss.training:
            self._loss.train()
        # Where DeepSpeed averages over ranks (stage 3) the factor undoes it.
        scale = (self._topology.data.size if engine.gradient_average else 1) / global_target_tokens
        sums = self._passes.train(self._computation(), micro_batches, step, scale)
        learning_rate = self._rate(self.updates + 1)
        for group in base_optimizer(engine).param_groups:
            group["lr"] = learning_rate
        if self._flat is not None:
            self._flat.reduce()
        engine.step()
        applied = bool(engine.was_step_applied())
        self.updates += int(applied)
        if applied and self._average is not None:
            self._average.update(self.updates)
        norm = float(engine.get_global_grad_norm())
        loss, nll = sums.tolist()
        return StepResult(
            sums=self._reported(loss, nll, sum(b.target_tokens for b in micro_batches)),
            grad_norm=norm if applied else math.inf,
            applied=applied,
            learning_rate=learning_rate,
        )

    def evaluate(self, batch: Batch) -> LossSums:
        """See `Engine.evaluate`. Runs in the precision that training runs in."""
        training = self._loss.training
        self._loss.eval()
        try:
            with torch.no_grad():
                loss, nll = self._passes.evaluate(self._computation(), batch)
        finally:
            self._loss.train(training)
        return self._reported(loss, nll, batch.target_tokens)

    def _computation(self) -> Computation:
        engine = self._engine
        return Computation(
            forward=engine,
            backward=engine.backward,
            gradient=lambda parameter: accumulated_gradient(engine, parameter),
            device=self._topology.device,
        )

    def _reported(self, loss: float, nll: float, target_tokens: int) -> LossSums:
        """Sums that add up over all ranks: the last pipeline stage computes the loss, all ranks that divide its layers
        have the same one, and the first of them tells it."""
        axes = self._topology.axes
        if axes.tensor.rank > 0 or axes.pipe.rank < axes.pipe.size - 1:
            return LossSums(loss=0.0, nll=0.0, target_tokens=0)
        return LossSums(loss=loss, nll=nll, target_tokens=target_tokens)

    def fragments(self, divide: bool) -> list[Fragment]:
        """See `Engine.fragments`."""
        data = self._topology.data
        averages = None if self._average is None else self._average.tensors
        return list_fragments(self._engine, data.rank, data.size, divide, averages)

    def restored(self, updates: int) -> None:
        """See `Engine.restored`."""
        self.updates = updates
        set_step(self._engine, updates)
        refresh_weights(self._engine)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See `Engine.averaged_weights`. Masters and average change places, so that no third copy is held."""
        if self._average is None:
            raise ValueError("this engine keeps no moving average: set train.ema")
        self._average.swap()
        refresh_weights(self._engine)
        try:
            yield
        finally:
            self._average.swap()
            refresh_weights(self._engine)

    def plain_module(self) -> Transformer:
        """See `Engine.plain_module`. Where this rank holds all weights (stages 0 to 2, no model parallelism) it is the
        trained module itself, put into evaluation mode until the next training step; else a copy, gathered tensor by
        tensor, that lives as long as the caller holds it."""
        if not self._partitioned and self._topology.axes.model.size == 1:
            self._loss.eval()
            return self._model
        check_fit(self._model, self._topology)
        return gather_module(self._model, self._topology, self._opened)

    def close(self) -> None:
        """See `Engine.close`. Puts back what ZeRO-3 replaced in torch; safe to call twice."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        if self._partitioned:
            nn.functional.linear = self._linear

    def _opened(self, parameter: Tensor) -> contextlib.AbstractContextManager[None]:
        return _gathered(parameter) if self._partitioned else contextlib.nullcontext()


def _build_adam(
    optimization: Optimization, update: Update | None, zero_stage: int, topology: Topology
) -> torch.optim.Optimizer:
    """AdamW (Adam where weight_decay is 0), fused: unfused, a step of 26M parameters takes 0.24 s longer on a CPU.

    update: what takes the place of torch's own.
    """
    groups, optim = optimization.groups, optimization.settings
    settings: dict[str, Any] = {
        "lr": optimization.rate(1),
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "fused": True,
    }
    if zero_stage == 0:
        settings |= {"counts": lambda p: tag_of(p).writer, "total": topology.axes.model.sum}
        return GuardedAdam(groups, optim.clip_norm, update=update, **settings)
    return EagerAdamW(groups, update, **settings)


def _gathered(parameter: Tensor) -> contextlib.AbstractContextManager[None]:
    """While it is entered (by every rank), a parameter divided by ZeRO-3 is whole."""
    import deepspeed

    context: contextlib.AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameter)
    return context


def _read_facts(engine: Any, model: Transformer, topology: Topology) -> EngineFacts:
    dtypes = {p.dtype for p in model.parameters()}
    masters = {fragment.views["fp32"].dtype for fragment in list_fragments(engine, 0, 1, divide=False)}
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(next(iter(dtypes)))
    if half and len(dtypes) == 1 and masters <= {torch.float32}:
        precision = half
    elif dtypes == {torch.float32} and engine.torch_autocast_enabled():
        precision = "bf16-autocast" if engine.torch_autocast_dtype() == torch.bfloat16 else "autocast"
    elif dtypes == {torch.float32}:
        precision = "fp32"
    else:
        precision = "+".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    device = next(model.parameters()).device
    native = isinstance(getattr(base_optimizer(engine), "update", None), NativeUpdate) and any(
        isinstance(module, CountedDropout) for module in model.modules()
    )
    queries = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else next(iter(dtypes))
    return EngineFacts(
        attention=model.attention_backend(device, queries),
        precision=precision,
        zero_stage=int(engine.zero_optimization_stage()),
        world_size=int(engine.dp_world_size * engine.mp_world_size),
        tensor_parallel=topology.axes.tensor.size,
        pipeline_parallel=topology.axes.pipe.size,
        device=device.type,
        kernels="native" if native else "torch",
    )


def _check_facts(
    facts: EngineFacts, precision: PrecisionConfig, zero_stage: int, topology: Topology, engine: Any
) -> None:
    wanted_precision = "bf16-autocast" if precision.dtype == "bf16" and zero_stage == 0 else precision.dtype
    pairs = (
        ("precision.dtype", wanted_precision, facts.precision),
        ("parallel.zero_stage", zero_stage, facts.zero_stage),
        ("the number of data-parallel ranks", topology.data.size, int(engine.dp_world_size)),
        ("the number of ranks of one replica", topology.axes.model.size, int(engine.mp_world_size)),
        ("launch.device", topology.device.type, facts.device),
    )
    for what, wanted, found in pairs:
        if wanted != found:
            raise RunError(f"{what}: expected {wanted}, but DeepSpeed built {found}")


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, imported late (it takes 2 seconds) and kept from compiling, probing compilers and talking."""
    os.environ["DS_ACCELERATOR"] = device.type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
    warnings.filterwarnings("ignore", module=r"deepspeed(\..*)?")
    # It calls collectives by names that torch warns of at every call.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory collectives are compiled for a minute when the first engine starts, and hang on a stale lock.
    # Setting the entry before the table is first looked at also spares the compiler runs that fill the table.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    _import_muon()
    return deepspeed


def _import_muon() -> None:
    """DeepSpeed imports this optimizer, which nobody here uses, to know it by its class; its functions are marked with
    torch.compile, which loads a whole compiler for them: 2 seconds of every process. Imported here, they stay plain."""
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compile_function
