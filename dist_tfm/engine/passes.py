"""How a step's micro-batches go forward and backward: one after another on a whole model, or through a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from data_pipeline.api import Batch
from dist_tfm.engine.base import to_device
from dist_tfm.model.layers import LayerRunner, run_plainly
from dist_tfm.parallel.pipeline import Pipeline, Work
from dist_tfm.parallel.tied import TiedGradients

RunnerFactory = Callable[[int, int], LayerRunner]
"""(step, index of the micro-batch) to what runs that micro-batch's layers, seeding each one's dropout."""


class Computation(NamedTuple):
    """What an engine offers to whoever orders the passes.

    forward: (source [B, S], target_in [B, T], labels [B, T], run, ...) to the module's outputs. backward: one backward
    pass from a scalar, gradients being added up. gradient: where a parameter's gradients have been added up.
    """

    forward: Callable[..., Any]
    backward: Callable[[Tensor], Any]
    gradient: Callable[[Tensor], Tensor]
    device: torch.device


class Passes(Protocol):
    """Takes micro-batches through a module that gives (loss_sum, nll_sum) where the loss is computed."""

    def train(self, compute: Computation, batches: Sequence[Batch], step: int, scale: float) -> Tensor:
        """Forward and backward of all micro-batches of a step, each loss_sum times `scale`; when it returns, this
        rank's gradients lack nothing but the sum over replicas. Returns (loss, nll) in float64, undivided and summed
        over micro-batches; zeros on ranks that compute no loss."""
        ...

    def evaluate(self, compute: Computation, batch: Batch) -> tuple[float, float]:
        """(loss_sum, nll_sum) of one micro-batch without gradient; zeros on ranks that compute no loss."""
        ...


def guarded(loss_sum: Tensor, scale: float) -> Tensor:
    """loss_sum * scale, whose gradient is NaN where the loss is not finite: then all ranks skip the update."""
    return loss_sum * (scale + loss_sum.detach() * 0.0)


class WholePasses:
    """A whole model on every rank: each micro-batch forward, then backward."""

    def __init__(self, runner: RunnerFactory) -> None:
        self._runner = runner

    def train(self, compute: Computation, batches: Sequence[Batch], step: int, scale: float) -> Tensor:
        """See `Passes.train`."""
        sums = torch.zeros(2, dtype=torch.float64, device=compute.device)
        for batch in batches:
            loss_sum, nll_sum = compute.forward(*to_device(batch, compute.device), self._runner(step, batch.index))
            compute.backward(guarded(loss_sum, scale))
            sums += torch.stack((loss_sum.detach(), nll_sum.detach())).double()
        return sums

    def evaluate(self, compute: Computation, batch: Batch) -> tuple[float, float]:
        """See `Passes.evaluate`."""
        loss_sum, nll_sum = compute.forward(*to_device(batch, compute.device), run_plainly)
        return float(loss_sum), float(nll_sum)


class PipelinePasses:
    """One stage of a pipeline: micro-batches overlap in the order of its schedule; tied gradients are summed after."""

    def __init__(self, pipeline: Pipeline, tied: TiedGradients, runner: RunnerFactory) -> None:
        self._pipeline, self._tied, self._runner = pipeline, tied, runner

    def train(self, compute: Computation, batches: Sequence[Batch], step: int, scale: float) -> Tensor:
        """See `Passes.train`."""
        work = [_work(compute, batch, self._runner(step, batch.index)) for batch in batches]
        results = self._pipeline.train(work, compute.backward, lambda outputs: guarded(outputs[0], scale))
        self._tied.settle(compute.gradient)
        sums = torch.zeros(2, dtype=torch.float64, device=compute.device)
        for loss_sum, nll_sum in results:
            sums += torch.stack((loss_sum, nll_sum)).double()
        return sums

    def evaluate(self, compute: Computation, batch: Batch) -> tuple[float, float]:
        """See `Passes.evaluate`."""
        results = self._pipeline.evaluate([_work(compute, batch, run_plainly)])
        if not results:
            return 0.0, 0.0
        loss_sum, nll_sum = results[0]
        return float(loss_sum), float(nll_sum)


def _work(compute: Computation, batch: Batch, run: LayerRunner) -> Work:
    """The micro-batch for a stage; its ids are brought to the device when its forward pass begins."""

    def forward(*received: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], compute.forward(*to_device(batch, compute.device), run, *received))

    pairs, source_length = batch.source.shape
    return Work(pairs, source_length, batch.target_in.shape[1], forward)
