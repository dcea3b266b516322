"""In pydantic's place where `gpu.sh` finds a host without it and without a network: what is imported of it, checking
nothing.

What a benchmark on a GPU is configured with is written in its own code, so there is nothing to check. Whoever does ask
for a check is refused. No other program has this folder on its path.
"""

from typing import Any


class ValidationError(ValueError):
    """Never raised: nothing is checked."""


class Unchecked:
    """A constraint, of which nobody asks whether it holds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass


Field = AfterValidator = BeforeValidator = Unchecked


def ConfigDict(**named: Any) -> dict[str, Any]:  # noqa: N802 (pydantic's name)
    """Settings of a check."""
    return named


class TypeAdapter:
    """A check of data from outside, which is not to be had here."""

    def __init__(self, kind: Any) -> None:
        raise ImportError(f"expected pydantic, to check {kind}, found its stand-in: pip install pydantic")

    def __class_getitem__(cls, kind: Any) -> type["TypeAdapter"]:
        return cls
