"""A whole model out of its parts: what decoding needs where parameters are divided over ranks."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from dist_tfm.engine.base import DoesNotFitError
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.layers import interval
from dist_tfm.parallel.memory import available_bytes
from dist_tfm.parallel.tags import tag_of
from dist_tfm.parallel.topology import Topology

MIB = 1 << 20


def gather_module(
    model: Transformer, tensor: Axis, opened: Callable[[Tensor], AbstractContextManager[None]]
) -> Transformer:
    """A plain copy of a divided model on every rank, in evaluation mode, gathered parameter by parameter.

    opened: makes a parameter readable while it is entered (ZeRO-3 keeps none). Collective over `tensor`.
    """
    weights: dict[str, Tensor] = {}
    for parameter in model.parameters():
        with opened(parameter):
            weights[tag_of(parameter).name] = gather_whole(parameter, tensor)
    with torch.device("meta"):
        module = Transformer(model.config, model.vocab_size, model.source_vocab_size)
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
    needed = sum(math.prod(tag_of(p).shape) * p.element_size() for p in model.parameters())
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
