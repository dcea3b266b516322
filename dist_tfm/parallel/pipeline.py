"""Runs a stage's schedule: computes, and exchanges hidden states and their gradients with the neighbouring stages.

All stages of a replica read the same micro-batches, so each knows the shape of everything that it receives: nothing but
hidden states travels, shapes may differ from one micro-batch to the next, and there is nothing to agree on first.
Shapes: B batch, S source, T target, D d_model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dist_tfm.parallel.links import Links, Message
from dist_tfm.parallel.partition import Side, StagePlan
from dist_tfm.parallel.schedule import (
    Action,
    Backward,
    Exchange,
    Forward,
    Parcel,
    forward_only,
    one_forward_one_backward,
    peer,
)


class Work(NamedTuple):
    """One micro-batch as a stage sees it.

    batch, source_length, target_length: B, S, T. forward: from what is received to what leaves the stage; on the last
    stage to a tuple whose first element is the scalar that is differentiated.
    """

    batch: int
    source_length: int
    target_length: int
    forward: Callable[..., tuple[Tensor, ...]]


class _Deliver(torch.autograd.Function):
    """A scalar whose backward pass hands each of the stage's outputs the gradient that came for it.

    One scalar for all outputs: one backward pass. Gradients are handed on as they came, whatever factor (of loss
    scaling) the scalar itself is multiplied with: the last stage's loss has it already.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return (None, *gradients, *[None] * len(gradients))


class Pipeline:
    """One stage's part in the passes of a step.

    dtype: of hidden states, on every stage; a stage that computes another one raises ValueError.
    """

    def __init__(self, plan: StagePlan, stage: int, links: Links, device: torch.device, dtype: torch.dtype) -> None:
        self._plan, self._stage, self._links = plan, stage, links
        self._device, self._dtype = device, dtype

    def train(
        self,
        work: Sequence[Work],
        backward: Callable[[Tensor], None],
        differentiated: Callable[[tuple[Tensor, ...]], Tensor],
    ) -> list[tuple[Tensor, ...]]:
        """Forward and backward of all micro-batches. Returns the last stage's outputs, detached; elsewhere nothing.

        backward: runs one backward pass from a scalar. differentiated: the scalar to begin from, out of the last
        stage's outputs.
        """
        schedule = one_forward_one_backward(self._stage, self._plan.stages, len(work))
        return _Run(self, work, backward, differentiated).follow(schedule)

    @torch.no_grad()
    def evaluate(self, work: Sequence[Work]) -> list[tuple[Tensor, ...]]:
        """Forward of all micro-batches. Returns the last stage's outputs; elsewhere nothing."""
        return _Run(self, work, None, None).follow(forward_only(self._stage, self._plan.stages, len(work)))


class _Run:
    """The tensors of one step while it is running."""

    def __init__(
        self,
        pipeline: Pipeline,
        work: Sequence[Work],
        backward: Callable[[Tensor], None] | None,
        differentiated: Callable[[tuple[Tensor, ...]], Tensor] | None,
    ) -> None:
        self._plan, self._stage, self._links = pipeline._plan, pipeline._stage, pipeline._links
        self._device, self._dtype = pipeline._device, pipeline._dtype
        self._work, self._backward, self._differentiated = work, backward, differentiated
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._arrived: dict[int, tuple[Tensor, ...]] = {}  # gradients of outputs
        self._leaving: dict[int, tuple[Tensor, ...]] = {}  # gradients of what was received
        self._results: list[tuple[Tensor, ...]] = []

    def follow(self, schedule: Sequence[Action]) -> list[tuple[Tensor, ...]]:
        for action in schedule:
            if isinstance(action, Exchange):
                self._exchange(action)
            elif isinstance(action, Forward):
                self._forward(action.index)
            else:
                self._differentiate(action)
        return self._results

    def _exchange(self, exchange: Exchange) -> None:
        sending = [Message(t, peer(self._stage, p, True)) for p in exchange.send for t in self._contents(p)]
        expected = [(parcel, self._buffers(parcel)) for parcel in exchange.receive]
        receiving = [Message(t, peer(self._stage, p, False)) for p, tensors in expected for t in tensors]
        self._links.exchange(sending, receiving)
        for parcel, tensors in expected:
            if parcel.kind == "activations":
                self._received[parcel.index] = tuple(t.requires_grad_(self._backward is not None) for t in tensors)
            else:
                self._arrived[parcel.index] = tensors

    def _contents(self, parcel: Parcel) -> tuple[Tensor, ...]:
        if parcel.kind == "gradients":
            return self._leaving.pop(parcel.index)
        outputs = self._outputs[parcel.index] if self._backward else self._outputs.pop(parcel.index)
        return tuple(output.detach().contiguous() for output in outputs)

    def _buffers(self, parcel: Parcel) -> tuple[Tensor, ...]:
        work = self._work[parcel.index]
        activations = parcel.kind == "activations"
        sides = self._plan.received(self._stage) if activations else self._plan.sent(self._stage)
        shapes: dict[Side, tuple[int, int]] = {
            "source": (work.batch, work.source_length),
            "target": (work.batch, work.target_length),
        }
        width = self._plan.model.d_model
        return tuple(torch.empty(*shapes[side], width, dtype=self._dtype, device=self._device) for side in sides)

    def _forward(self, index: int) -> None:
        outputs = self._work[index].forward(*self._received.get(index, ()))
        if self._stage == self._plan.last:
            self._results.append(tuple(output.detach() for output in outputs))
        elif any(output.dtype != self._dtype for output in outputs):
            found = [str(output.dtype) for output in outputs]
            raise ValueError(f"expected stage {self._stage} to hand on {self._dtype}, found {found}")
        self._outputs[index] = outputs

    def _differentiate(self, action: Backward) -> None:
        assert self._backward is not None  # only the schedule of training has backward passes
        assert self._differentiated is not None
        outputs = self._outputs.pop(action.index)
        received = self._received.pop(action.index, ())
        if self._stage == self._plan.last:
            scalar = self._differentiated(outputs)
        else:
            gradients = self._arrived.pop(action.index)
            scalar = cast(Tensor, _Deliver.apply(len(outputs), *outputs, *gradients))  # type: ignore[no-untyped-call]
        self._backward(scalar)
        # Every side that enters a stage is used in it or handed on, so that each has a gradient.
        self._leaving[action.index] = tuple(cast(Tensor, tensor.grad).contiguous() for tensor in received)
