"""Which combinations of tensor, pipeline, data parallelism and ZeRO there are, and the nearest one to any other.

- parallel.tp divides model.heads, model.kv_heads and model.d_ff, and the processes of each host: its ranks share one.
- parallel.pp is at most the number of layers: a stage holds at least one.
- parallel.tp x parallel.pp divides the number of processes.
- parallel.zero_stage: up to 1 with pipeline parallelism (stages 2 and 3 divide gradients that a stage still adds to),
  up to 2 with tensor parallelism, up to 3 with neither.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from dist_tfm.config.schema import Config, ModelConfig, ParallelConfig
from dist_tfm.errors import ConfigError

FLEX_WIDTH = 16
"""Least width of a head for model.attention=flex on a GPU: what a product of Triton's needs."""


def highest_zero_stage(parallel: ParallelConfig) -> int:
    """The highest ZeRO stage that goes with these tp and pp."""
    return 1 if parallel.pp > 1 else 2 if parallel.tp > 1 else 3


def layout_faults(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Faults of section `parallel` that can be told without knowing the number of processes."""
    faults: list[str] = []
    if _divisible(model) % parallel.tp:
        shared = "" if model.kv_heads is None else f"model.kv_heads={model.kv_heads}, "
        faults.append(
            f"parallel.tp: expected a divisor of model.heads={model.heads}, {shared}and of model.d_ff={model.d_ff}, "
            f"found {parallel.tp}"
        )
    layers = model.encoder_layers + model.decoder_layers
    if parallel.pp > layers:
        faults.append(f"parallel.pp: expected at most one stage for each of the {layers} layers, found {parallel.pp}")
    highest = highest_zero_stage(parallel)
    if parallel.zero_stage > highest:
        together = "pipeline" if parallel.pp > 1 else "tensor"
        faults.append(
            f"parallel.zero_stage: expected at most {highest} together with {together} parallelism, found "
            f"{parallel.zero_stage}"
        )
    nearest = f"; the nearest valid combination is {describe(_nearest(model, parallel))}"
    return [fault + nearest for fault in faults]


def check_world(config: Config, world_size: int, local_world_size: int) -> None:
    """Raises ConfigError unless `world_size` processes, `local_world_size` of them on this host, can be laid out so."""
    parallel = config.parallel
    tp, pp, fault = parallel.tp, parallel.pp, ""
    if world_size % (tp * pp):
        fault = (
            f"parallel.tp={tp} x parallel.pp={pp}: expected a number of processes that {tp * pp} divides, found "
            f"{world_size}: start {-(-world_size // (tp * pp)) * tp * pp} processes"
        )
    elif local_world_size % tp:
        fault = (
            f"parallel.tp: expected a divisor of the {local_world_size} processes on each host, which its ranks share, "
            f"found {tp}: start a multiple of {tp} on each host"
        )
    if fault:
        nearest = describe(_nearest(config.model, parallel, world_size, local_world_size))
        raise ConfigError(f"{fault}, or take the nearest valid combination, {nearest}")


def check_device(config: Config, device: str) -> None:
    """Raises ConfigError unless a device of this kind (cpu, cuda) can train as the configuration says."""
    if config.precision.dtype == "fp16" and device != "cuda":
        raise ConfigError(
            f"precision.dtype: fp16 trains on GPUs only, found launch.device {device}: use bf16, which needs no loss "
            "scale, or fp32"
        )
    if config.model.attention == "flex":
        _check_flex(config.model, device)
    _check_kernels(config, device)


def _check_flex(model: ModelConfig, device: str) -> None:
    if device != "cuda":
        raise ConfigError(
            f"model.attention: flex trains on GPUs only, found launch.device {device}, where torch has no backward "
            "pass for it: use auto, which computes the same"
        )
    widths = model.key_width, model.value_width
    if min(widths) < FLEX_WIDTH:
        raise ConfigError(
            f"model.attention: flex expects heads at least {FLEX_WIDTH} wide on a GPU, found d_k, d_v = {widths}: use "
            "auto, or fewer heads"
        )


def _check_kernels(config: Config, device: str) -> None:
    if config.train.kernels == "native" and device != "cpu":
        raise ConfigError(
            f"train.kernels: native ones run on CPUs only, found launch.device {device}: set train.kernels=torch"
        )


def describe(parallel: ParallelConfig) -> str:
    """A combination as a user gives it."""
    return f"parallel.tp={parallel.tp} parallel.pp={parallel.pp} parallel.zero_stage={parallel.zero_stage}"


def _divisible(model: ModelConfig) -> int:
    """What tensor-parallel ranks must divide."""
    return math.gcd(model.heads, model.key_value_heads, model.d_ff)


def _nearest(
    model: ModelConfig, asked: ParallelConfig, world_size: int | None = None, local_world_size: int | None = None
) -> ParallelConfig:
    """The valid combination whose tp and pp differ least from those asked for, by factors; of two such the smaller."""

    def distance(tp_pp: tuple[int, int]) -> tuple[float, int]:
        tp, pp = tp_pp
        return abs(math.log(tp / asked.tp)) + abs(math.log(pp / asked.pp)), tp * pp

    tp, pp = min(_valid(model, world_size, local_world_size), key=distance)
    near = replace(asked, tp=tp, pp=pp)
    return replace(near, zero_stage=min(near.zero_stage, highest_zero_stage(near)))


def _valid(model: ModelConfig, world_size: int | None, local_world_size: int | None) -> Iterator[tuple[int, int]]:
    """Every valid (tp, pp), on any number of processes where that is not given."""
    shards = math.gcd(_divisible(model), local_world_size or 0)  # gcd(n, 0) = n
    stages = range(1, model.encoder_layers + model.decoder_layers + 1)
    for tp in range(1, shards + 1):
        if shards % tp == 0:
            yield from ((tp, pp) for pp in stages if world_size is None or world_size % (tp * pp) == 0)
