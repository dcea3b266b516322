"""Where DeepSpeed keeps the optimizer's state of each parameter, as views into its own memory.

Reading and writing state goes through these views: no gather, no copy, no communication, and none of DeepSpeed's
`safe_get_*` helpers, which hang or fall silent before the first step, with several parameter groups, or at stage 0.
The functions take DeepSpeed's engine and optimizer objects; the layouts are those of DeepSpeed 0.19.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dist_tfm.engine.base import Fragment
from dist_tfm.parallel.tags import Tag, tag_of


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's (at stage 0 it is the engine's own)."""
    optimizer = engine.optimizer
    return cast(torch.optim.Optimizer, getattr(optimizer, "optimizer", optimizer))


def flat_tensors(engine: Any) -> list[Tensor]:
    """The tensors that Adam sees on this rank: flat fp32 partitions, or at stage 0 the parameters themselves."""
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if stage:
        return list(_partitions(optimizer)[1])
    return [p for group in base_optimizer(engine).param_groups for p in group["params"]]


def create_state(engine: Any) -> None:
    """Makes Adam's state, which torch would make in the first step, so that it can be read and filled before."""
    state = base_optimizer(engine).state
    for flat in flat_tensors(engine):
        if "exp_avg" not in state[flat]:
            state[flat].update(
                step=torch.zeros((), dtype=torch.float32, device=flat.device),
                exp_avg=torch.zeros_like(flat.detach()),
                exp_avg_sq=torch.zeros_like(flat.detach()),
            )


def set_step(engine: Any, updates: int) -> None:
    """Sets Adam's own count of updates, which its bias correction reads, for every tensor (padding-only ones too)."""
    state = base_optimizer(engine).state
    for flat in flat_tensors(engine):
        state[flat]["step"].fill_(updates)


def accumulated_gradient(engine: Any, parameter: Tensor) -> Tensor:
    """Where the gradients of a parameter have been added up since the last step, in fp32 or the parameter's dtype; what
    is written there is what the next step takes. Stages 0 and 1. Raises ValueError where no backward pass has come by.
    """
    optimizer = engine.optimizer
    if (gradient := getattr(parameter, "_hp_grad", None)) is None:  # where FlatGradients or Fp32Partitions add up
        fp16 = hasattr(optimizer, "get_gradient_for_reduction")
        gradient = optimizer.get_gradient_for_reduction(parameter) if fp16 else parameter.grad
    if gradient is None:
        raise ValueError(f"expected a gradient of {tag_of(parameter).name}, found none: no backward pass has come by")
    return cast(Tensor, gradient)


def set_masters(fragments: Sequence[Fragment], weights: Mapping[str, Tensor]) -> None:
    """Copies this rank's local weights, by canonical name, into the master weights that it holds of them."""
    for fragment in fragments:
        part = weights[fragment.tag.name].reshape(-1)[fragment.start : fragment.start + fragment.numel]
        fragment.views["fp32"].copy_(part)


def list_fragments(
    engine: Any, rank: int, ranks: int, divide: bool, averages: Mapping[Tensor, Tensor] | None = None
) -> list[Fragment]:
    """This rank's fragments; `divide` cuts whole copies (stage 0) into one part for each of `ranks`.

    averages: the moving average of each of `flat_tensors`, if there are any; they become views of kind "ema".
    """
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        places = _stage3(engine.optimizer)
    elif stage:
        places = _stages_1_and_2(engine.optimizer)
    else:
        places = _stage0(engine, rank if divide else 0, ranks if divide else 1)
    state = base_optimizer(engine).state
    fragments = []
    for tag, flat, offset, start, numel in places:
        sources = {"fp32": flat.detach(), "exp_avg": state[flat]["exp_avg"], "exp_avg_sq": state[flat]["exp_avg_sq"]}
        if averages is not None:
            sources["ema"] = averages[flat]
        views = {kind: tensor.view(-1).narrow(0, offset, numel) for kind, tensor in sources.items()}
        fragments.append(Fragment(tag=tag, start=start, numel=numel, views=views))
    return fragments


def refresh_weights(engine: Any) -> None:
    """Copies the fp32 masters into the weights of the forward pass, which are copies of
    their own from stage 1 on (in fp32 from stage 2 on)."""
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer.update_lp_params()


Place = tuple[Tag, Tensor, int, int, int]
"""(tag, flat tensor, offset in it, start in the parameter, elements)."""


def _stage0(engine: Any, part: int, parts: int) -> Iterator[Place]:
    for parameter in flat_tensors(engine):
        share = math.ceil(parameter.numel() / parts)
        start = share * part
        numel = min(share, parameter.numel() - start)
        if numel > 0:
            yield tag_of(parameter), parameter, start, start, numel


def _partitions(optimizer: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    """(parameters of each group, this rank's flat fp32 partition of each group). BF16_Optimizer has its own names."""
    if hasattr(optimizer, "bf16_groups"):
        return optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    return optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups


def _stages_1_and_2(optimizer: Any) -> Iterator[Place]:
    for group, flat in zip(*_partitions(optimizer), strict=True):
        for parameter in group:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:  # None: no part of it is on this rank
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield tag_of(parameter), flat, there.start, here.start, here.numel


def _stage3(optimizer: Any) -> Iterator[Place]:
    for group in optimizer.fp16_groups:
        for parameter in group:
            index, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = numel * optimizer._get_param_partition_rank(parameter)
            kept = min(numel, parameter.ds_numel - start)  # the last ranks hold padding
            if kept > 0:
                yield tag_of(parameter), optimizer.fp32_partitioned_groups_flat[index], offset, start, kept
