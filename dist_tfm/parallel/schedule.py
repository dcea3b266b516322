"""The order in which a pipeline stage computes and communicates: one forward, one backward (1F1B), as plain data.

After a warm-up each stage alternates forward and backward passes (Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1): stage k of p holds the activations of at
most p - k micro-batches, however many there are. Nothing here computes or communicates: `pipeline.py` does as told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["activations", "gradients"]
"""What travels: activations to the next stage, their gradients back to the previous one."""


@dataclass(frozen=True)
class Parcel:
    """What one stage sends another of micro-batch `index` (its place among the rank's micro-batches of the step)."""

    kind: Kind
    index: int


@dataclass(frozen=True)
class Forward:
    """The forward pass of micro-batch `index`."""

    index: int


@dataclass(frozen=True)
class Backward:
    """The backward pass of micro-batch `index`."""

    index: int


@dataclass(frozen=True)
class Exchange:
    """Sends and receives that are started together, and all waited for.

    Together, because two neighbours that both wait to send before they receive would wait for ever where a send ends
    only with its receive (NCCL).
    """

    send: tuple[Parcel, ...]
    receive: tuple[Parcel, ...]


Action = Forward | Backward | Exchange


def peer(stage: int, parcel: Parcel, sending: bool) -> int:
    """The stage at the other end: activations come from the stage before and go to the next, gradients the reverse."""
    return stage + (1 if (parcel.kind == "activations") == sending else -1)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What stage `stage` of `stages` does in a step of `micro_batches`, in order.

    With forward and backward passes of equal cost on every stage, (p - 1) / (m + p - 1) of the time is idle.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    plan: list[Action] = []
    for i in range(warm_up):
        plan += [Exchange((), (Parcel("activations", i),)), Forward(i), Exchange((Parcel("activations", i),), ())]
    if warm_up < micro_batches:
        plan.append(Exchange((), (Parcel("activations", warm_up),)))
    for j in range(micro_batches - warm_up):
        ahead = j + warm_up
        coming = (Parcel("activations", ahead + 1),) if ahead + 1 < micro_batches else ()
        plan += [
            Forward(ahead),
            Exchange((Parcel("activations", ahead),), (Parcel("gradients", j),)),
            Backward(j),
            Exchange((Parcel("gradients", j),), coming),
        ]
    for j in range(micro_batches - warm_up, micro_batches):
        plan += [Exchange((), (Parcel("gradients", j),)), Backward(j), Exchange((Parcel("gradients", j),), ())]
    return _within(stage, stages, plan)


def forward_only(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What a stage does to evaluate `micro_batches`."""
    plan: list[Action] = []
    for i in range(micro_batches):
        plan += [Exchange((), (Parcel("activations", i),)), Forward(i), Exchange((Parcel("activations", i),), ())]
    return _within(stage, stages, plan)


def _within(stage: int, stages: int, plan: Sequence[Action]) -> list[Action]:
    """The plan without parcels to or from stages that there are not."""
    result: list[Action] = []
    for action in plan:
        if isinstance(action, Exchange):
            send = tuple(p for p in action.send if 0 <= peer(stage, p, sending=True) < stages)
            receive = tuple(p for p in action.receive if 0 <= peer(stage, p, sending=False) < stages)
            if send or receive:
                result.append(Exchange(send, receive))
        else:
            result.append(action)
    return result
