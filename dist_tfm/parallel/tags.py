"""Which part of which canonical parameter each local parameter is: a mark that travels with the parameter itself.

It outlives deepspeed.initialize, changes of dtype, wrapping and cutting into stages: no wrapped name is ever parsed.
"""

from typing import NamedTuple, cast

from torch import Tensor, nn

_ATTRIBUTE = "canonical_tag"


class Tag(NamedTuple):
    """Rows [low, high) along dimension `dim` of the parameter `name`, whose full shape is `shape`.

    `writer` is False on replicas, which leave writing it, and counting it in the gradient norm, to another rank: over
    all tensor- and pipeline-parallel ranks of one replica of the model every element has exactly one writer.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    low: int
    high: int
    writer: bool

    @property
    def whole(self) -> bool:
        """Whether this is the full parameter."""
        return (self.low, self.high) == (0, self.shape[self.dim])


def tag_parameters(model: nn.Module) -> None:
    """Marks each parameter with its name in `model` and its shape, as whole and this rank's to write.

    Parameters that bear a tag already keep it: whoever divides or replicates them tags them anew with `set_tag`.
    """
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, _ATTRIBUTE):
            shape = tuple(parameter.shape)
            set_tag(parameter, Tag(name, shape, dim=0, low=0, high=shape[0], writer=True))


def set_tag(parameter: Tensor, tag: Tag) -> None:
    """Marks one parameter."""
    setattr(parameter, _ATTRIBUTE, tag)


def tag_of(parameter: Tensor) -> Tag:
    """The tag of a parameter. Raises AttributeError where it has none."""
    return cast(Tag, getattr(parameter, _ATTRIBUTE))
