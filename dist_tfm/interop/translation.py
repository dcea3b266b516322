"""What importing a model of any other program needs: tensors taken by name, tokens renumbered, embeddings told apart.

A model that is imported computes the same function, not with the same numbers: our tokens 0 to 3 are the special ones,
our embeddings are multiplied by sqrt(D), our scores are divided by sqrt(d_k). What a program does otherwise is put into
the weights once, here.
Shapes: D d_model, V vocabulary (ours), V' vocabulary (theirs).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from data_pipeline.errors import shown
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import InputError

T = TypeVar("T", int, float, str, bool)
Order = tuple[int | None, ...]
"""Their token of each of ours; None where they have none."""

SILENT = -100.0
"""The output bias of a token that they do not have: its probability is below 1e-30, and 0 in sums of fp32."""


@dataclass(frozen=True)
class Imported:
    """A model in our terms: section `model`, weights by canonical name (fp32), and whose tokens ours are."""

    config: ModelConfig
    weights: dict[str, Tensor]
    order: Order


class Settings:
    """Their configuration, a JSON object of which only what differs from a default may have been written."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], origin: str) -> None:
        """origin: what to call it in errors."""
        self._values = {**defaults, **values}
        self._origin = origin

    def get(self, name: str, kind: type[T]) -> T:
        """A setting of this type. Raises InputError."""
        value = self._values.get(name)
        if type(value) is int and kind is float:
            value = float(value)
        if type(value) is not kind:
            raise InputError(f"{self._origin}: expected {name} to be {kind.__name__}, found {shown(value)}")
        return value

    def choose(self, name: str, choices: Mapping[str, T]) -> T:
        """Our word for a setting's value. Raises InputError for a value that has none."""
        found = self.get(name, str)
        if found not in choices:
            known = ", ".join(choices)
            raise InputError(
                f"{self._origin}: expected {name} to be one of {known}, found {found!r}: it has no equal here"
            )
        return choices[found]

    def same(self, *names: str) -> int:
        """The value that several settings have in common. Raises InputError where they differ."""
        first, *others = (self.get(name, int) for name in names)
        if any(other != first for other in others):
            raise InputError(f"{self._origin}: expected one value for {' and '.join(names)}, found {[first, *others]}")
        return first

    def refuse(self, *names: str) -> None:
        """Raises InputError if one of these is switched on."""
        for name in names:
            if self._values.get(name):
                raise InputError(f"{self._origin}: {name} has no equal here, expected it to be off")


class Weights:
    """Their tensors, each of which is taken once, as fp32."""

    def __init__(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        """origin: what to call them in errors."""
        self._tensors = dict(tensors)
        self._origin = origin

    def take(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor, of this shape if one is named. Raises InputError."""
        tensor = self.take_first(name)
        if tensor is None:
            raise InputError(f"{self._origin}: expected a tensor {name}, found none")
        if shape is not None and list(tensor.shape) != list(shape):
            raise InputError(f"{self._origin}: expected {name} to be {list(shape)}, found {list(tensor.shape)}")
        return tensor

    def take_first(self, *names: str) -> Tensor | None:
        """The first tensor of these names that is there; the others stay."""
        for name in names:
            if name in self._tensors:
                return self._tensors.pop(name).detach().float()
        return None

    def take_shared(self, shared: str, *names: str) -> list[Tensor]:
        """The matrices of these names; those that were not stored are the shared one. Raises InputError."""
        common = self.take_first(shared)
        found = [self.take_first(name) for name in names]
        known = [common if matrix is None else matrix for matrix in found]
        whole = [matrix for matrix in known if matrix is not None]
        if len(whole) < len(names):
            raise InputError(f"{self._origin}: expected a tensor {shared}, or {' and '.join(names)}, found neither")
        return whole

    def finish(self) -> None:
        """Raises InputError if a tensor has not been taken: what is not understood is not left out."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:3])
            raise InputError(
                f"{self._origin}: found {len(self._tensors)} tensors that have no equal here ({names}, ...)"
            )


def token_order(size: int, pad: int, start: int, end: int, unknown: int | None) -> Order:
    """Their ids in the order of ours: padding, begin of the target, end, unknown, then the others as they come.

    Where they begin the target with their padding, this token becomes our BOS, and our PAD is one that they have not.
    Raises InputError for ids that are not below `size` or stand for two of these.
    """
    special = (None if pad == start else pad, start, end, unknown)
    named = [row for row in special if row is not None]
    if len(set(named)) < len(named) or not all(0 <= row < size for row in named):
        raise InputError(f"expected different special ids below {size}, found pad {pad}, start {start}, end {end}")
    return (*special, *(row for row in range(size) if row not in named))


def reordered(values: Tensor, order: Order, missing: float = 0.0) -> Tensor:
    """values [V', ...] in our order [V, ...]; `missing` for tokens that they do not have."""
    rows = torch.tensor([-1 if row is None else row for row in order])
    shape = (len(order), *[1] * (values.dim() - 1))
    return torch.where((rows < 0).view(shape), missing, values[rows.clamp(min=0)])


def embedding_weights(
    inputs: tuple[Tensor, Tensor], output: Tensor, bias: Tensor | None, order: Order
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(keys of section `model`, weights) of embeddings and projection, tied as far as they are the same.

    inputs: source and target matrix [V', D] such that sqrt(D) times a row is embedded; output [V', D], bias [V'] or
    None: what scores.
    """
    source, target = inputs
    one_input, one_target = torch.equal(source, target), torch.equal(target, output)
    tied = ("all" if one_input else "decoder") if one_target else ("inputs" if one_input else "none")
    weights = {"embedding.weight": reordered(target, order)}
    if not one_input:
        weights["source_embedding.weight"] = reordered(source, order)
    if not one_target:
        weights["projection.weight"] = reordered(output, order)
    biased = None in order or (bias is not None and bool(bias.any()))
    if biased:
        weights["score_bias.bias"] = reordered(torch.zeros(len(output)) if bias is None else bias, order, SILENT)
    return {"tied": tied, "output_bias": biased}, weights


def take_layers(
    shapes: Mapping[str, Sequence[int]], weights: Weights, spell: Callable[[str], str]
) -> dict[str, Tensor]:
    """The parameters of both stacks, taken by their names; shapes: of our parameters by canonical name."""
    return {name: weights.take(spell(name), shape) for name, shape in shapes.items() if is_in_stack(name)}


def is_in_stack(name: str) -> bool:
    """Whether a canonical name is a parameter of the encoder or decoder, and not of the embeddings."""
    return name.startswith(("encoder.", "decoder."))


def split_name(name: str) -> tuple[str, str, str, str]:
    """encoder.layers.3.feed_forward.up.weight to ("encoder", "3", "feed_forward.up", "weight")."""
    side, _, number, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return side, number, part, kind


def attention_names(ours: str, theirs: str, projections: Mapping[str, str]) -> dict[str, str]:
    """The projections of one attention: "self_attention.query" to "self_attn.q_proj" and so on."""
    return {f"{ours}.{name}": f"{theirs}.{other}" for name, other in projections.items()}


def refuse_unless(what: str, holds: Iterable[tuple[str, bool]]) -> None:
    """Raises ValueError naming what keeps our model from being theirs."""
    if faults := [fault for fault, fine in holds if not fine]:
        raise ValueError(f"{what} cannot express this model: it needs {', '.join(faults)}")
