"""A whole model out of its parts: what decoding needs where parameters are divided over ranks."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn

from dist_tfm.engine.base import DoesNotFitError
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.layers import interval
from dist_tfm.parallel.memory import available_bytes
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology

MIB = 1 << 20


def gather_module(
    model: Transformer, topology: Topology, opened: Callable[[Tensor], AbstractContextManager[None]]
) -> Transformer:
    """A plain copy of a divided model on every rank, in evaluation mode, gathered parameter by parameter: first over
    the tensor-parallel ranks of the pipeline stage that holds it, then from this stage to the others.

    opened: makes a parameter readable while it is entered (ZeRO-3 keeps none). Collective over the world.
    """
    axes, stages = topology.axes, _first_holders(model, topology)
    mine = {tag_of(parameter).name: parameter for parameter in model.parameters()}
    like = next(model.parameters())
    module = _skeleton(model)
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if stages[name] == axes.pipe.rank:
            with opened(mine[name]):
                whole = gather_whole(mine[name], axes.tensor)
        else:
            whole = torch.empty(parameter.shape, dtype=like.dtype, device=like.device)
        weights[name] = axes.pipe.broadcast(whole, stages[name])
    module.load_state_dict(weights, strict=True, assign=True)
    return module.requires_grad_(False).eval()


def gather_whole(parameter: Tensor, tensor: Axis) -> Tensor:
    """A copy of the whole parameter of which each rank holds a part or a replica; collective where it is divided."""
    tag, local = tag_of(parameter), parameter.detach()
    if tag.whole:
        return local.clone()
    lengths = [high - low for low, high in (interval(tag.shape[tag.dim], r, tensor.size) for r in range(tensor.size))]
    shape = list(local.shape)
    shape[tag.dim] = max(lengths)  # parts differ by one row, and what is gathered must not
    even = local.new_zeros(shape)
    even.narrow(tag.dim, 0, tag.high - tag.low).copy_(local)
    parts = tensor.gather(even)
    return torch.cat([part.narrow(tag.dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim=tag.dim)


def check_fit(model: Transformer, topology: Topology) -> None:
    """Raises DoesNotFitError on every rank unless each of them has memory for one more whole model; collective."""
    item = next(model.parameters()).element_size()
    needed = sum(math.prod(p.shape) * item for p in _skeleton(model).parameters())
    if topology.device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(topology.device)[0]
    else:
        available, ranks = available_bytes(), topology.ranks.local_world_size
        free = None if available is None else available // ranks  # all of them gather at the same time
    fits = free is None or needed <= free
    reports = cast(list[int | None], topology.world.gather(None if fits else free))
    short = [report for report in reports if report is not None]
    if short:
        raise DoesNotFitError(
            f"a whole model takes {needed / MIB:,.0f} MiB on each rank, and one of them has {min(short) / MIB:,.0f} "
            "left: translate from a checkpoint, or validate on fewer processes a host"
        )


def _skeleton(model: Transformer) -> Transformer:
    """A whole model whose parameters take no memory, to be filled."""
    with torch.device("meta"):
        return Transformer(model.config, model.vocab_size, model.source_vocab_size)


def _first_holders(model: nn.Module, topology: Topology) -> Mapping[str, int]:
    """The first pipeline stage that holds each parameter of the whole model; collective."""
    if topology.axes.pipe.size == 1:
        return {tag_of(parameter).name: 0 for parameter in model.parameters()}
    names = cast(list[list[str]], topology.world.gather([tag_of(parameter).name for parameter in model.parameters()]))
    holders: dict[str, int] = {}
    for rank, held in enumerate(names):  # ascending ranks are ascending stages
        for name in held:
            holders.setdefault(name, topology.grid.place(rank).pipe)
    return holders
