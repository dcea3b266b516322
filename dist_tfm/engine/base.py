"""What the training loop asks of an engine. One engine exists (DeepSpeed); the loop knows only this protocol.

An engine trains on micro-batches whose losses are SUMS over real target tokens, divided once by the number of target
tokens of the whole step, over all data-parallel ranks and micro-batches.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from data_pipeline.api import Batch
from dist_tfm.errors import RunError
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.tags import Tag

STATE_KINDS = ("fp32", "exp_avg", "exp_avg_sq")
"""What a checkpoint holds of each parameter: master weight and both Adam moments, in fp32. With train.ema also "ema",
the moving average of the master weight."""


class DoesNotFitError(RunError):
    """A whole model is asked for where a rank has no memory for one. All ranks raise it alike."""


@dataclass(frozen=True)
class LossSums:
    """Sums over real target tokens; `loss` is label-smoothed, `nll` is not.

    They add up over ALL ranks: of the ranks that compute one micro-batch together, all but one report zeros.
    """

    loss: float
    nll: float
    target_tokens: int


@dataclass(frozen=True)
class StepResult:
    """What one step did. `sums` are this rank's; `grad_norm` is global, before clipping, inf on a skipped step."""

    sums: LossSums
    grad_norm: float
    applied: bool
    learning_rate: float


@dataclass(frozen=True)
class EngineFacts:
    """What really runs, read back from the built engine: it goes into every line of metrics.jsonl."""

    attention: str
    precision: str  # "fp32", "bf16" and "fp16" (fp32 master weights) or "bf16-autocast" (ZeRO stage 0)
    zero_stage: int
    world_size: int  # processes, of which tensor_parallel x pipeline_parallel hold one replica of the model
    tensor_parallel: int
    pipeline_parallel: int
    device: str
    kernels: str  # "torch", or "native" where dropout, the loss's rows and Adam are compiled C++


@dataclass(frozen=True)
class Fragment:
    """A flat range [start, start + numel) of a local parameter whose optimizer state this rank holds.

    views: state kind to an fp32 view (flat, numel elements) into the optimizer's own memory: reading and writing it
    needs no copy and no communication.
    """

    tag: Tag
    start: int
    numel: int
    views: dict[str, Tensor]


class Engine(Protocol):
    """Trains one model on this rank's share of each step. Every method is collective."""

    updates: int
    """Optimizer updates applied so far; the schedule and Adam count these."""

    facts: EngineFacts

    def train_batch(self, micro_batches: Sequence[Batch], step: int, global_target_tokens: int) -> StepResult:
        """Forward and backward of every micro-batch, then one optimizer update at the schedule's rate for
        `updates + 1`, skipped on all ranks alike if a gradient is not finite.

        step: number of the step (from 1), which with the micro-batch's index seeds every layer's dropout.
        """
        ...

    def evaluate(self, batch: Batch) -> LossSums:
        """Loss without dropout or gradient; all ranks call it equally often (fill with zero-weight batches)."""
        ...

    def fragments(self, divide: bool) -> list[Fragment]:
        """This rank's share of the state. divide: where ranks hold whole copies (ZeRO stage 0), cut the work of writing
        into equal parts, one a rank; otherwise every rank gets all that it holds, for reading."""
        ...

    def restored(self, updates: int) -> None:
        """Call once every fragment's views were filled: sets the update count and refreshes the forward weights."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """While it is entered, the model computes with the moving average of its weights; afterwards every bit is as it
        was. Nothing but `evaluate` and `plain_module` may be called meanwhile. Raises ValueError where none is kept."""
        ...

    def plain_module(self) -> Transformer:
        """A whole, unsharded model in evaluation mode with the current weights (gathered where they are divided).
        Raises DoesNotFitError, on every rank, where one of them has no memory for it."""
        ...

    def close(self) -> None:
        """Gives back the engine's memory and hooks."""
        ...


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(source [B, S], target_in [B, T], labels [B, T]) of a micro-batch as int64 tensors on `device`."""
    source, target_in, labels = (torch.from_numpy(array) for array in (batch.source, batch.target_in, batch.labels))
    if device.type == "cpu":
        return source, target_in, labels
    return tuple(t.pin_memory().to(device, non_blocking=True) for t in (source, target_in, labels))  # type: ignore[return-value]
