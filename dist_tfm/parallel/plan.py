"""How the Transformer is divided over tensor-parallel ranks: the name of a module says how it is divided.

The model knows nothing of it: the plan takes a built, initialised model, or a pipeline stage cut from one, and puts
divided layers into the places of whole ones.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dist_tfm.model.attention import MultiHeadAttention
from dist_tfm.model.embedding import Embedding, OutputBias
from dist_tfm.model.feed_forward import FeedForward, GatedFeedForward
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.axis import Axis
from dist_tfm.parallel.layers import (
    DividedAttend,
    DividedRegion,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    column_parallel,
    keep_replica,
    take_shard,
)
from dist_tfm.parallel.stages import Elsewhere
from dist_tfm.parallel.tags import tag_parameters


def divide_heads(attention: MultiHeadAttention, axis: Axis) -> nn.Module:
    """Heads over ranks, and with them the keys and values that they share: query, key and value by outputs, output by
    inputs; relative positions by heads too."""
    projections = ("query", "key", "value", "output")
    biases = frozenset(f"{name}.bias" for name in projections)
    _expect(attention, {f"{name}.weight" for name in projections}, biases | {"relative.weight"})
    _divisible("heads", attention.heads, axis)
    _divisible("heads of keys and values", attention.kv_heads, axis)
    attention.heads //= axis.size
    attention.kv_heads //= axis.size
    for name in ("query", "key", "value"):
        setattr(attention, name, column_parallel(getattr(attention, name), axis))
    setattr(attention, "output", RowParallelLinear(attention.output, axis))  # noqa: B010 (another type of module)
    if attention.relative is not None:
        attention.relative.weight = take_shard(attention.relative.weight, 0, axis)
    attention.attend = DividedAttend(attention.attend, axis)
    return DividedRegion(attention, axis)


def divide_inner(feed_forward: FeedForward | GatedFeedForward, axis: Axis) -> nn.Module:
    """d_ff over ranks: up, and the gate, by outputs, down by inputs."""
    gated = {"gate.weight", "up.weight", "down.weight"}
    _expect(feed_forward, gated if isinstance(feed_forward, GatedFeedForward) else _PLAIN)
    _divisible("d_ff", feed_forward.up.out_features, axis)
    feed_forward.up = column_parallel(feed_forward.up, axis)
    if isinstance(feed_forward, GatedFeedForward):
        feed_forward.gate = column_parallel(feed_forward.gate, axis)
    setattr(feed_forward, "down", RowParallelLinear(feed_forward.down, axis))  # noqa: B010 (another type of module)
    return DividedRegion(feed_forward, axis)


def divide_tokens(embedding: Embedding, axis: Axis) -> nn.Module:
    """The vocabulary over ranks, in an embedding."""
    _expect(embedding, {"weight"}, frozenset({"positions.weight"}))
    return VocabularyParallelEmbedding(embedding, axis)


def divide_scores(projection: nn.Linear, axis: Axis) -> nn.Module:
    """The vocabulary over ranks, in a projection of its own, which the loss reads."""
    _expect(projection, {"weight"})
    return column_parallel(projection, axis)


def divide_score_bias(score_bias: OutputBias, axis: Axis) -> nn.Module:
    """The vocabulary over ranks, in the bias of the scores."""
    _expect(score_bias, {"bias"})
    score_bias.bias = take_shard(score_bias.bias, 0, axis)
    return score_bias


_PLAIN = {"up.weight", "up.bias", "down.weight", "down.bias"}

PLAN: Mapping[str, Callable[[Any, Axis], nn.Module]] = {
    "self_attention": divide_heads,
    "cross_attention": divide_heads,
    "feed_forward": divide_inner,
    "embedding": divide_tokens,
    "source_embedding": divide_tokens,
    "projection": divide_scores,
    "score_bias": divide_score_bias,
}
"""The last part of a module's name to how it is divided."""

REPLICATED = ("norm", "_norm")
"""Endings of the names of modules that every rank holds whole."""


def divide(model: Transformer, axis: Axis) -> None:
    """Divides a model in place over `axis`, or what a pipeline stage has of it; every parameter is tagged with what it
    is of the whole one.

    Nothing changes where the axis has one rank. Raises ValueError for a number of heads or a d_ff that the ranks do
    not divide, and for a parameter that the plan does not know: divided wrongly, a model trains on and is wrong.
    """
    tag_parameters(model)
    if axis.size == 1:
        return
    for path, module in list(model.named_modules()):
        if isinstance(module, Elsewhere):
            continue
        if (rule := PLAN.get(path.rpartition(".")[2])) is not None:
            model.set_submodule(path, rule(module, axis))
        elif path.endswith(REPLICATED):
            for parameter in module.parameters(recurse=False):
                keep_replica(parameter, axis)
        elif (own := [name for name, _ in module.named_parameters(recurse=False)]) and not _below_a_rule(path):
            raise ValueError(f"the plan does not say how {path}.{own[0]} is divided over ranks")


def _below_a_rule(path: str) -> bool:
    return any(part in PLAN for part in path.split(".")[:-1])


def _expect(module: nn.Module, names: set[str], optional: frozenset[str] = frozenset()) -> None:
    found = {name for name, _ in module.named_parameters()}
    if found - optional != names:
        raise ValueError(f"expected the parameters {sorted(names)} to divide over ranks, found {sorted(found)}")


def _divisible(what: str, count: int, axis: Axis) -> None:
    if count % axis.size:
        raise ValueError(f"expected {what} that {axis.size} tensor-parallel ranks divide, found {count}")
