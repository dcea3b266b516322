"""Cleaning of training pairs as a list of small steps: the value of `data.clean`.

A step is a frozen dataclass: its fields are its parameters, its name stands in `step`. In a configuration a name alone
stands for the step with its defaults: `clean: [nfc, controls, blank, ratio, {step: digits, tolerance: 2}, length]`.

Steps run in the order of what they need to see: a text (nfc, controls), a pair (blank, characters, ratio, identical,
digits, held_out), its tokens (length), the whole corpus (duplicates). Those of one phase run in the order of the list,
and a pair is counted for the first one that rejects it.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticCustomError

RATIO_FREE_CHARACTERS = 20
"""A longer side of at most so many characters is never rejected for its ratio ("OK" may be a phrase elsewhere)."""

TEXT, PAIR, TOKENS, CORPUS = range(4)
"""Phases: what a step needs to see."""

Filter = Callable[[str, str], bool]
"""Says of a pair's cleaned text whether the pair is to go."""

_CHECKED = ConfigDict(extra="forbid")
_Count = Annotated[int, Field(ge=0)]
_DIGIT = re.compile(r"\d")


class _Shown:
    """Shows a step as it is written in a configuration: its name, or its name and the parameters that were set."""

    def __repr__(self) -> str:
        name, *parameters = fields(self)  # type: ignore[arg-type]
        found = {parameter.name: getattr(self, parameter.name) for parameter in parameters}
        changed = {p.name: found[p.name] for p in parameters if p.default is MISSING or found[p.name] != p.default}
        if not changed:
            return str(getattr(self, name.name))
        return f"{{step: {getattr(self, name.name)}, {', '.join(f'{k}: {v}' for k, v in changed.items())}}}"


@dataclass(frozen=True, repr=False)
class Nfc(_Shown):
    """Canonical composition of every text (Unicode's NFC). Part of every list: what is translated gets it too."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = TEXT

    step: Literal["nfc"] = "nfc"


@dataclass(frozen=True, repr=False)
class Controls(_Shown):
    """Control characters and byte order marks go, any white space becomes one space. Part of every list, as nfc is."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = TEXT

    step: Literal["controls"] = "controls"


@dataclass(frozen=True, repr=False)
class Blank(_Shown):
    """Rejects pairs of which one side is blank. Part of every list; the one step that held-out pairs go through too."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["blank"] = "blank"

    def rejects(self, source: str, target: str) -> bool:
        """Whether the pair is to go."""
        return not source or not target


@dataclass(frozen=True, repr=False)
class Characters(_Shown):
    """Rejects pairs of which one side has fewer than `least` or more than `most` characters."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["characters"] = "characters"
    least: _Count = 1
    most: Annotated[int, Field(ge=1)] = 5000

    def rejects(self, source: str, target: str) -> bool:
        """Whether the pair is to go."""
        return min(len(source), len(target)) < self.least or max(len(source), len(target)) > self.most


@dataclass(frozen=True, repr=False)
class Ratio(_Shown):
    """Rejects pairs of which one side has more than data.max_ratio times the characters of the other."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["ratio"] = "ratio"

    @staticmethod
    def filter(max_ratio: float) -> Filter:
        """What says whether a pair is to go."""

        def rejects(source: str, target: str) -> bool:
            longer, shorter = len(source), len(target)
            if longer < shorter:
                longer, shorter = shorter, longer
            return longer > RATIO_FREE_CHARACTERS and longer > max_ratio * shorter

        return rejects


@dataclass(frozen=True, repr=False)
class Identical(_Shown):
    """Rejects pairs whose sides are the same text of more than `longer_than` characters, whatever its case."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["identical"] = "identical"
    longer_than: _Count = 0

    def rejects(self, source: str, target: str) -> bool:
        """Whether the pair is to go."""
        if len(source) <= self.longer_than or source[:1].casefold()[:1] != target[:1].casefold()[:1]:
            return False
        return source == target or source.casefold() == target.casefold()


@dataclass(frozen=True, repr=False)
class Digits(_Shown):
    """Rejects pairs whose sides differ in more than `tolerance` digits: "12" and "21" do not, "12" and "13" in two.

    Digits of every script count, their order and what stands between them does not: 1,000.5 is 1.000,5 elsewhere.
    """

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["digits"] = "digits"
    tolerance: _Count = 0

    def rejects(self, source: str, target: str) -> bool:
        """Whether the pair is to go."""
        one, other = _DIGIT.findall(source), _DIGIT.findall(target)
        if one == other:
            return False
        first, second = (Counter(map(unicodedata.decimal, side)) for side in (one, other))
        return ((first - second) + (second - first)).total() > self.tolerance


@dataclass(frozen=True)
class ParallelText:
    """A test set whose pairs must not be trained on: two sides as data.train_source and data.train_target name them."""

    __pydantic_config__ = _CHECKED

    source: str
    target: str


@dataclass(frozen=True, repr=False)
class HeldOut(_Shown):
    """Rejects pairs that the validation set, or one of the test sets, has as well: both sides the same, or the source
    alone. Compared by 64-bit hashes of the cleaned text."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = PAIR

    step: Literal["held_out"] = "held_out"
    by: Literal["pair", "source"] = "pair"
    test: tuple[ParallelText, ...] = ()


@dataclass(frozen=True, repr=False)
class Length(_Shown):
    """Rejects pairs with a side of more than data.max_length tokens."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = TOKENS

    step: Literal["length"] = "length"


@dataclass(frozen=True, repr=False)
class Duplicates(_Shown):
    """Of pairs that are equal (both sides, or the source alone) one stays, drawn by data.shuffle_seed. Compared by
    64-bit hashes of the cleaned text: of a billion pairs, about 0.03 are expected to be taken for another."""

    __pydantic_config__ = _CHECKED
    phase: ClassVar[int] = CORPUS

    step: Literal["duplicates"] = "duplicates"
    by: Literal["pair", "source"] = "pair"


Step = Nfc | Controls | Blank | Characters | Ratio | Identical | Digits | HeldOut | Length | Duplicates
REQUIRED = ("nfc", "controls", "blank")


def _named(value: object) -> object:
    return {"step": value} if isinstance(value, str) else value


def _ordered(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    names = [step.step for step in steps]
    if missing := [name for name in REQUIRED if name not in names]:
        raise PydanticCustomError(
            "steps", "a list with {missing}, which every corpus goes through", {"missing": missing[0]}
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise PydanticCustomError("steps", "every step once, not {name} again", {"name": repeated[0]})
    if (ordered := sorted(steps, key=lambda step: step.phase)) != list(steps):
        raise PydanticCustomError("steps", "this order: {order}", {"order": ", ".join(s.step for s in ordered)})
    return steps


Steps = Annotated[
    tuple[Annotated[Annotated[Step, Field(discriminator="step")], BeforeValidator(_named)], ...],
    AfterValidator(_ordered),
]
"""The type of `data.clean`."""

DEFAULT_STEPS: tuple[Step, ...] = (Nfc(), Controls(), Blank(), Ratio(), Length())


def steps_to_json(steps: Sequence[Step]) -> str:
    """The steps as canonical JSON: the same text for the same steps."""
    return json.dumps([asdict(step) for step in steps], sort_keys=True)


def steps_from_json(text: str) -> tuple[Step, ...]:
    """What `steps_to_json` wrote."""
    steps: tuple[Step, ...] = TypeAdapter(Steps).validate_json(text)
    return steps


def find(steps: Iterable[Step], kind: type[Any]) -> Any | None:
    """The step of this kind, None if the list has none."""
    return next((step for step in steps if isinstance(step, kind)), None)


def pair_filters(steps: Sequence[Step], max_ratio: float, is_held_out: Filter) -> Mapping[str, Filter]:
    """Name to function of each step that judges a pair by its cleaned text, in order: it says whether the pair goes."""
    filters: dict[str, Filter] = {}
    for step in steps:
        if isinstance(step, Ratio):
            filters[step.step] = step.filter(max_ratio)
        elif isinstance(step, HeldOut):
            filters[step.step] = is_held_out
        elif isinstance(step, Blank | Characters | Identical | Digits):
            filters[step.step] = step.rejects
    return filters
