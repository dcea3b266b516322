"""What the engine costs: DeepSpeed against a bare PyTorch loop that trains the same model on the same micro-batches.

Both sides share the model, the loss, the seeds of dropout, the schedule, clipping and fused AdamW, so their losses must
agree (this is checked): what differs is the engine alone. Contenders train in turns, always on the same micro-batches:
of new shapes the first to come would pay for all, since oneDNN and CUDA keep what they have prepared for a shape.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Recorder, interleave, paired_ratio, say
from data_pipeline.api import Batch
from data_pipeline.loader import BlockLoader
from data_pipeline.shards import ShardReader
from dist_tfm.config.schema import Config, ModelConfig
from dist_tfm.engine.base import to_device
from dist_tfm.errors import RunError
from dist_tfm.kernels.native import load_kernels
from dist_tfm.metrics.flops import length_sums, measured_gemm_peak, training_flops
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.topology import Topology
from dist_tfm.training.building import build_engine
from dist_tfm.training.loss import TranslationLoss
from dist_tfm.training.native import NativeRowLoss, use_counted_dropout
from dist_tfm.training.optim import parameter_groups
from dist_tfm.training.randomness import SeededRunner
from dist_tfm.training.schedule import rate_function

Precision = Literal["fp32", "bf16", "bf16-autocast"]

AGREEMENT = {"fp32": 1e-4, "bf16": 2e-3}
"""Largest relative difference of a step's loss between the engine and its bare loop: else they do other work."""

KINDS = {
    "products": {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "copies": {
        "aten::copy_",
        "aten::cat",
        "aten::clone",
        "aten::_foreach_copy_",
        "aten::fill_",
        "aten::zero_",
        "aten::_foreach_zero_",
    },
    "adam": {"aten::_fused_adamw_", "aten::_fused_adam_"},
}
"""Kinds of operators by name; all others are "other", and time inside none of them is "python"."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure.

    micro_batch_tokens: padded tokens a side of each of a step's two micro-batches; rounds: timed steps of each
    contender, after one that warms up; profiled: steps of each that are profiled after them.
    """

    model: ModelConfig
    vocabulary: int
    micro_batch_tokens: int
    rounds: int
    profiled: int
    gemm_seconds: float


PAPERLIKE = Effort(
    model=ModelConfig(encoder_layers=3, decoder_layers=3),
    vocabulary=8000,
    micro_batch_tokens=2048,
    rounds=5,
    profiled=2,
    gemm_seconds=0.3,
)
QUICK = Effort(
    model=ModelConfig(encoder_layers=1, decoder_layers=1, d_model=64, d_ff=128, heads=2),
    vocabulary=4000,
    micro_batch_tokens=128,
    rounds=2,
    profiled=1,
    gemm_seconds=0.02,
)


class BareLoop:
    """The same training as the engine's, in plain PyTorch. bf16: bf16 weights, fp32 masters and accumulation."""

    def __init__(self, config: Config, vocabulary: int, precision: Precision, device: torch.device) -> None:
        model = Transformer(config.model, vocabulary)
        initialize(model, config.train.seed)
        model.packed = config.data.packing
        model.to(device)
        self._loss = TranslationLoss(model, config.train.label_smoothing)
        if config.train.kernels == "native":
            kernels = load_kernels()
            self._loss = TranslationLoss(model, config.train.label_smoothing, of_rows=NativeRowLoss(kernels))
            use_counted_dropout(model, kernels)
        self._weights: list[Tensor] = list(model.parameters())
        self._masters = self._weights
        groups = parameter_groups(model, config.optim)
        if precision == "bf16":
            self._masters = [nn.Parameter(p.detach().clone()) for p in self._weights]
            master_of = {id(p): m for p, m in zip(self._weights, self._masters, strict=True)}
            groups = [{**group, "params": [master_of[id(p)] for p in group["params"]]} for group in groups]
            model.bfloat16()
        self._config, self._device = config, device
        self._autocast = precision == "bf16-autocast"
        self._rate = rate_function(config.schedule, config.model.d_model)
        betas = (config.optim.beta1, config.optim.beta2)
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.optim.eps, fused=True)

    def train(self, batches: Sequence[Batch], step: int) -> float:
        """One step, counted from 1; the loss per target token."""
        tokens = sum(batch.target_tokens for batch in batches)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in batches:
            runner = SeededRunner(self._config.train.seed, step, batch.index, checkpointing=False)
            autocast = torch.autocast(self._device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
            with autocast:
                loss, _ = self._loss(*to_device(batch, self._device), runner)
            (loss / tokens).backward()
            total += loss.detach()
            self._accumulate()
        if self._config.optim.clip_norm:
            nn.utils.clip_grad_norm_(self._masters, self._config.optim.clip_norm)
        for group in self._adam.param_groups:
            group["lr"] = self._rate(step)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._publish()
        return float(total) / tokens

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Adds the bf16 gradients of a micro-batch to those of the fp32 masters."""
        if self._masters is self._weights:
            return
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Rounds the masters into the weights."""
        if self._masters is not self._weights:
            torch._foreach_copy_(self._weights, self._masters)


class Timing(NamedTuple):
    """Seconds of one step: by the clock on the wall, and of work of all threads of this process on its processors."""

    wall: float
    processor: float


@dataclasses.dataclass
class Contender:
    """Something that trains: a step's micro-batches and its number to the loss per target token."""

    name: str
    train: Callable[[Sequence[Batch], int], float]
    losses: list[float] = dataclasses.field(default_factory=list)

    def timed(self, batches: Sequence[Batch]) -> Timing:
        """How long the contender's next step takes."""
        wall, processor = time.perf_counter(), time.process_time()
        loss = self.train(batches, len(self.losses) + 1)
        timing = Timing(time.perf_counter() - wall, time.process_time() - processor)
        self.losses.append(loss)
        return timing

    def profiled(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Seconds of the contender's next step by kind of operator."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            total = self.timed(batches).wall
        seconds = dict.fromkeys((*KINDS, "other"), 0.0)
        for event in profiler.key_averages():
            kind = next((kind for kind, names in KINDS.items() if event.key in names), "other")
            seconds[kind] += event.self_cpu_time_total / 1e6
        return {**seconds, "python": total - sum(seconds.values())}


def measure_engine_cost(
    config: Config, reader: ShardReader, topology: Topology, effort: Effort, recorder: Recorder
) -> None:
    """Rows of one dtype: the engine at ZeRO stage 0 and 1, the bare loop, what the engine adds, and where.

    config: its model and batch sizes are replaced by the effort's. Raises RunError if contenders' losses part.
    """
    dtype = config.precision.dtype
    data = dataclasses.replace(
        config.data, batch_tokens=2 * effort.micro_batch_tokens, micro_batches=2, workers=0, window_pairs=1_000_000
    )
    config = dataclasses.replace(config, model=effort.model, data=data)
    say(f"engine cost, {dtype}: {effort.rounds} rounds of 2 x {effort.micro_batch_tokens} tokens")
    with BlockLoader(reader, config.data, config.train.seed, rank=0, dp=1) as loader:
        batches = loader.next_step().micro_batches
    bare_of: dict[int, Precision] = {0: "bf16-autocast" if dtype == "bf16" else "fp32", 1: dtype}
    with contextlib.ExitStack() as stack:
        contenders = [
            Contender(f"bare-loop-{precision}", BareLoop(config, effort.vocabulary, precision, topology.device).train)
            for precision in dict.fromkeys(bare_of.values())
        ]
        contenders += [_engine_contender(config, stage, effort.vocabulary, topology, stack) for stage in bare_of]
        seconds = interleave({c.name: partial(c.timed, batches) for c in contenders}, 1 + effort.rounds)
        with profile(activities=[ProfilerActivity.CPU]):
            torch.zeros(1).add_(1)  # starting the profiler for the first time takes a while
        shares = interleave({c.name: partial(c.profiled, batches) for c in contenders}, effort.profiled)
    pairs = {f"engine-{dtype}-stage-{stage}": f"bare-loop-{bare}" for stage, bare in bare_of.items()}
    losses = {contender.name: contender.losses for contender in contenders}
    for ours, theirs in pairs.items():
        check_agreement((ours, losses[ours]), (theirs, losses[theirs]), AGREEMENT[dtype])
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    peak = measured_gemm_peak(topology.device, kind, seconds=effort.gemm_seconds)
    wall, processor = ({name: [t[i] for t in times[1:]] for name, times in seconds.items()} for i in (0, 1))
    _record_speeds(wall, pairs, batches, config, effort.vocabulary, peak, recorder)
    for ours, theirs in pairs.items():
        what = ours.removeprefix("engine-")
        recorder.add(f"engine-cost-{what}", paired_ratio(wall[ours], wall[theirs]) - 1, "fraction")
        recorder.add(f"engine-cost-processor-{what}", paired_ratio(processor[ours], processor[theirs]) - 1, "fraction")
        for part in shares[ours][0]:
            extra = [a[part] - b[part] for a, b in zip(shares[ours], shares[theirs], strict=True)]
            recorder.add(f"engine-extra-{what}-{part}", statistics.median(extra), "s/step")


def check_agreement(ours: tuple[str, Sequence[float]], theirs: tuple[str, Sequence[float]], tolerance: float) -> None:
    """ours, theirs: (name, loss of each step). Raises RunError unless they agree in every step."""
    for step, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True), 1):
        if not abs(a - b) <= tolerance * abs(b):
            raise RunError(
                f"{ours[0]} and {theirs[0]} were expected to train alike, but at step {step} their losses are {a} and "
                f"{b}: their times cannot be compared"
            )


def _engine_contender(
    config: Config, stage: int, vocabulary: int, topology: Topology, stack: contextlib.ExitStack
) -> Contender:
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero_stage=stage))
    engine = build_engine(config, vocabulary, topology)
    stack.callback(engine.close)

    def train(batches: Sequence[Batch], step: int) -> float:
        result = engine.train_batch(batches, step, sum(batch.target_tokens for batch in batches))
        return result.sums.loss / result.sums.target_tokens

    return Contender(f"engine-{config.precision.dtype}-stage-{stage}", train)


def _record_speeds(
    timed: Mapping[str, Sequence[float]],
    pairs: Mapping[str, str],
    batches: Sequence[Batch],
    config: Config,
    vocabulary: int,
    peak: float,
    recorder: Recorder,
) -> None:
    """Rows of each contender's tokens a second. pairs: an engine's name to that of its bare loop."""
    sums = length_sums(batches)
    flops = training_flops(config.model, vocabulary, sums)
    # A bare loop that both stages are compared with is rated against stage 1, the default, which comes last.
    rival = {bare: engine for engine, bare in pairs.items()}
    for name, seconds in timed.items():
        ratio = paired_ratio(seconds, timed[rival[name]]) if name in rival else None
        median = statistics.median(seconds)
        recorder.add(name, (sums.source + sums.target) / median, "tokens/s", ratio, flops / median / peak)
