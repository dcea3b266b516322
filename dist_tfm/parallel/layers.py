"""Layers divided over the tensor-parallel ranks (Shoeybi et al. 2019, Megatron-LM, section 3), equal to the whole ones.

Inside a divided region each rank computes with its own part of the heads, of d_ff or of the vocabulary; outside, every
rank holds the same activations, bit for bit. `enter` and `leave` are the two borders: each is the other's gradient.
Shapes: B batch, T positions, D d_model, V vocabulary, R ranks of the axis.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_tfm.model.attention_kernels import Attend, Weighting
from dist_tfm.model.embedding import Embedding
from dist_tfm.model.initialization import mix
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.tags import set_tag, tag_of


def interval(total: int, rank: int, size: int) -> tuple[int, int]:
    """[low, high) of `total` rows that fall to a rank: contiguous, in rank order, lengths differing by one at most."""
    return total * rank // size, total * (rank + 1) // size


def take_shard(parameter: Tensor, dim: int, axis: Axis) -> nn.Parameter:
    """This rank's rows along `dim` of a whole, tagged parameter, as a parameter with memory of its own."""
    low, high = interval(parameter.size(dim), axis.rank, axis.size)
    shard = nn.Parameter(parameter.detach().narrow(dim, low, high - low).clone(memory_format=torch.contiguous_format))
    set_tag(shard, tag_of(parameter)._replace(dim=dim, low=low, high=high, writer=True))
    return shard


def keep_replica(parameter: Tensor, axis: Axis) -> None:
    """Tags a parameter that every rank holds whole: the first rank writes and counts it."""
    set_tag(parameter, tag_of(parameter)._replace(writer=axis.rank == 0))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(grads[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def enter(x: Tensor, axis: Axis) -> Tensor:
    """Into a divided region: x as it is; in the backward pass the ranks' gradients are summed (Megatron's f)."""
    if axis.size == 1:
        return x
    return cast(Tensor, _Enter.apply(x, axis))  # type: ignore[no-untyped-call]


def leave(x: Tensor, axis: Axis) -> Tensor:
    """Out of a divided region: the sum of the ranks' parts; the gradient goes back as it is (Megatron's g)."""
    if axis.size == 1:
        return x
    return cast(Tensor, _Leave.apply(x, axis))  # type: ignore[no-untyped-call]


def column_parallel(linear: nn.Linear, axis: Axis) -> nn.Linear:
    """The outputs of `linear` that fall to this rank; its input must have entered. weight [out / R, in]."""
    with torch.device("meta"):
        divided = nn.Linear(1, 1, bias=linear.bias is not None)
    divided.weight = take_shard(linear.weight, 0, axis)
    divided.out_features, divided.in_features = divided.weight.shape
    if linear.bias is not None:
        divided.bias = take_shard(linear.bias, 0, axis)
    return divided


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are divided: each rank multiplies its own, and the sum leaves the region.

    weight [out, in / R]; bias [out], if there is one, is a replica, added once, after the sum.
    """

    def __init__(self, whole: nn.Linear, axis: Axis) -> None:
        super().__init__()
        self._axis = axis
        self.weight = take_shard(whole.weight, 1, axis)
        self.bias = whole.bias
        if self.bias is not None:
            keep_replica(self.bias, axis)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in / R] to [..., out], the same on every rank."""
        whole = leave(F.linear(x, self.weight), self._axis)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class DividedRegion(nn.Module):
    """A module whose first layers are column-parallel and whose last one is row-parallel: its inputs enter here.

    A tensor that is given twice (self-attention's queries and memory) enters once, so that its gradient is summed once.
    """

    def __init__(self, inner: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.inner = inner
        self._axis = axis

    def forward(self, *inputs: Any) -> Tensor:
        """As the module inside."""
        entered: dict[int, Tensor] = {}
        for value in inputs:
            if isinstance(value, Tensor) and value.is_floating_point() and id(value) not in entered:
                entered[id(value)] = enter(value, self._axis)
        return cast(Tensor, self.inner(*(entered.get(id(value), value) for value in inputs)))


class DividedAttend:
    """An attention kernel over this rank's heads, whose dropout is drawn independently of the other ranks'."""

    def __init__(self, attend: Attend, axis: Axis) -> None:
        self._attend, self._axis = attend, axis

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, weighting: Weighting) -> Tensor:
        """See `dist_tfm.model.attention_kernels.Attend`."""
        if weighting.dropout == 0:
            return self._attend(query, key, value, weighting)
        with own_randomness(self._axis.rank, query.device):
            return self._attend(query, key, value, weighting)


@contextmanager
def own_randomness(rank: int, device: torch.device) -> Iterator[None]:
    """While it is entered, `device` draws random numbers of this rank's own; afterwards all ranks go on alike.

    Seeded by (a number that all ranks draw alike, rank): a function of the layer's seed, as all randomness is.
    """
    # From the CPU's generator, which the layer's seed has set too: no GPU is waited for.
    common = int(torch.randint(2**62, (), generator=torch.default_generator))
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(mix(common, rank))
    try:
        yield
    finally:
        generator.set_state(state)


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens [low, high) of a vocabulary of `size` that this rank of `axis` embeds and scores.

    Shards differ by one token where R does not divide V. No row is added to even them out, so that nothing needs to be
    kept out of the softmax, the smoothing or the predictions.
    """

    axis: Axis
    size: int

    @property
    def low(self) -> int:
        """First token."""
        return interval(self.size, self.axis.rank, self.axis.size)[0]

    @property
    def high(self) -> int:
        """One past the last token."""
        return interval(self.size, self.axis.rank, self.axis.size)[1]

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [...] as rows of the shard, 0 where another rank has them; and the mask [...] of those that are here."""
        here = (ids >= self.low) & (ids < self.high)
        return torch.where(here, ids - self.low, 0), here


class VocabularyParallelEmbedding(Embedding):
    """An embedding whose matrix is divided by tokens: each rank looks up its own, and the sum leaves the region.

    Parameter: weight [V / R, D]; learned positions, if there are any, are replicas.
    """

    def __init__(self, whole: Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)  # all parts are taken over
        self._shard = VocabularyShard(axis, whole.weight.size(0))
        self.weight = take_shard(whole.weight, 0, axis)
        self.scale, self.positions, self.dropout = whole.scale, whole.positions, whole.dropout
        for parameter in self.parameters():
            if parameter is not self.weight:
                keep_replica(parameter, axis)

    def look_up(self, ids: Tensor) -> Tensor:
        """ids [B, T] to [B, T, D], the same on every rank: one rank finds each row, the others give zeros."""
        rows, here = self._shard.local(ids)
        return leave(F.embedding(rows, self.weight).masked_fill(~here[..., None], 0.0), self._shard.axis)
