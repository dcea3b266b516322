"""Which cases run in which world. A world is named by its size and, where it is a second one of that size, a letter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dist_tfm.parallel.topology import Topology
from tests.distributed import average_cases, cases, checkpoint_cases
from tests.oracle import Recipe

Case = Callable[[Topology, Path], Any]


class Exact(NamedTuple):
    """A run that is compared with the oracle's."""

    stage: int
    recipe: Recipe
    checkpointing: bool = False

    @property
    def name(self) -> str:
        recipe, extra = self.recipe, "_recomputed" if self.checkpointing else ""
        return f"{recipe.norm}_{recipe.precision}_m{recipe.micro_batches}_stage{self.stage}{extra}"


class Load(NamedTuple):
    """A checkpoint written by `source` ranks at one stage and precision, loaded by another layout."""

    source: int
    written: Exact
    loaded: Exact

    @property
    def name(self) -> str:
        return f"load_{self.source}_{self.written.name}_as_{self.loaded.name}"

    @property
    def run(self) -> str:
        return f"{self.source}_{self.written.name}"


BASE = Recipe()  # post-norm, four micro-batches: accumulation 4, 2, 2 (with fillers) and 1 on 1 to 4 ranks
STAGES = (0, 1, 2, 3)
FP32 = [Exact(stage, BASE) for stage in STAGES]
BF16 = [Exact(0, replace(BASE, precision="bf16-autocast"))] + [
    Exact(stage, replace(BASE, precision="bf16")) for stage in (1, 2, 3)
]
PRE = {count: replace(BASE, norm="pre", micro_batches=count) for count in (2, 5)}

EXACT: dict[str, list[Exact]] = {
    "1": [*FP32, BF16[0], BF16[1], BF16[3], Exact(1, PRE[2])],
    "3": [*FP32, BF16[1], Exact(1, PRE[5]), Exact(3, PRE[2])],  # two micro-batches: a rank that has only a filler
    "4": [*FP32, Exact(2, PRE[5]), Exact(1, PRE[2])],
    "2": [*FP32, *BF16, Exact(3, PRE[2]), Exact(1, PRE[5]), Exact(2, PRE[2], True), Exact(3, BASE, True)],
}

LOADS: dict[str, list[Load]] = {
    "3": [Load(1, FP32[1], FP32[3]), Load(1, FP32[0], FP32[2]), Load(3, FP32[2], FP32[2])],
    "4": [Load(3, FP32[1], FP32[0]), Load(3, FP32[3], FP32[1]), Load(1, FP32[2], FP32[3])],
    "2": [
        *(Load(2, exact, exact) for exact in (*FP32[:2], FP32[3], *BF16[:2])),
        Load(1, FP32[1], FP32[2]),
        Load(1, FP32[3], FP32[0]),
        Load(3, FP32[0], FP32[3]),
        Load(4, FP32[3], FP32[1]),
        Load(1, BF16[1], BF16[2]),
        Load(1, BF16[3], BF16[1]),
        Load(1, FP32[1], BF16[1]),
        Load(1, BF16[1], FP32[2]),
    ],
    "1b": [
        Load(1, FP32[3], FP32[3]),
        Load(2, FP32[1], FP32[0]),
        Load(2, FP32[3], FP32[2]),
        Load(3, FP32[2], FP32[1]),
        Load(4, FP32[0], FP32[1]),
        Load(4, FP32[2], FP32[3]),
        Load(2, BF16[3], BF16[3]),
    ],
}
"""Worlds are run in the order 1, 3, 4, 2, 1 again, so that each finds the checkpoints of those before it."""

MUTANTS = (
    "mean_of_rank_means",
    "tied_gradient_counted_twice",
    "padding_counted_as_tokens",
    "dropout_seeded_by_rank",
)

SKIPS: dict[str, list[tuple[Exact, str, str]]] = {
    "1": [(FP32[0], "gradient", "nan"), (FP32[1], "gradient", "inf")],
    "2": [
        *((exact, "gradient", "nan") for exact in (*FP32, *BF16[:2])),
        *((exact, "loss", "inf") for exact in (FP32[0], FP32[1], FP32[3])),
        (FP32[0], "gradient", "inf"),
    ],
    "3": [(FP32[3], "loss", "nan")],
    "4": [(FP32[1], "gradient", "inf")],
}

DAMAGES = ("flipped_byte", "truncated", "missing_file", "edited_manifest", "no_marker", "unfinished")

BYTES = {"2": (0, 1, 2, 3), "4": (1, 2, 3)}

EVALUATED: dict[str, list[Exact]] = {"1": [FP32[0]], "2": [FP32[1], FP32[3], BF16[0], BF16[1]], "3": [FP32[3]]}

AVERAGED: dict[str, list[Exact]] = {"1": [FP32[1]], "3": [FP32[3]], "2": [*FP32, BF16[1]]}
"""Runs with a moving average of their weights."""

AVERAGES_LOADED: dict[str, list[tuple[int, Exact, int]]] = {
    "2": [(3, FP32[3], 1), (1, FP32[1], 3), (3, FP32[3], 0)],
    "1b": [(2, FP32[0], 2), (2, BF16[1], 1)],
}
"""(ranks that wrote a checkpoint of such a run, how, the stage that it is loaded into)."""

AFTER = {"3": ("1",), "4": ("3",), "2": ("4",), "1b": ("2",)}
"""Worlds whose checkpoints a world loads."""


def skip_name(exact: Exact, what: str, value: str) -> str:
    return f"skip_{what}_{value}_{exact.name}"


def _training_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for e in EXACT.get(world, ()):
        found[e.name] = partial(cases.exact, name=e.name, stage=e.stage, recipe=e.recipe, checkpointing=e.checkpointing)
    for e in EVALUATED.get(world, ()):
        name = f"evaluate_{e.name}"
        found[name] = partial(cases.evaluating, name=name, stage=e.stage, recipe=e.recipe)
    for e, what, value in SKIPS.get(world, ()):
        found[skip_name(e, what, value)] = partial(
            cases.skipping, stage=e.stage, recipe=e.recipe, what=what, value=value
        )
    for stage in BYTES.get(world, ()):
        found[f"bytes_stage{stage}"] = partial(cases.optimizer_bytes, stage=stage, recipe=BASE)
    if world == "2":
        for fault in MUTANTS:
            found[fault] = partial(cases.mutant, name=fault, stage=1, recipe=BASE, fault=fault)
        found["linear"] = partial(cases.linear_is_restored, recipe=BASE)
    return found


def _average_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for e in AVERAGED.get(world, ()):
        found[f"average_{e.name}"] = partial(average_cases.averaging, stage=e.stage, recipe=e.recipe)
    for source, written, stage in AVERAGES_LOADED.get(world, ()):
        found[f"average_load_{source}_{written.name}_stage{stage}"] = partial(
            average_cases.loading, source=source, written=written.stage, stage=stage, recipe=written.recipe
        )
    return found


def _checkpoint_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for load in LOADS.get(world, ()):
        e = load.loaded
        found[load.name] = partial(
            checkpoint_cases.loading, source=load.run, stage=e.stage, recipe=e.recipe, name=load.name
        )
    if world == "2":
        for how in DAMAGES:
            found[how] = partial(checkpoint_cases.damage, recipe=BASE, how=how)
        found["all_damaged"] = partial(checkpoint_cases.all_damaged, recipe=BASE)
        for stage in (1, 3):
            found[f"wrong_architecture_{stage}"] = partial(
                checkpoint_cases.wrong_architecture, source=f"1_{FP32[1].name}", stage=stage, recipe=BASE
            )
            found[f"init_from_{stage}"] = partial(
                checkpoint_cases.initializing, source=f"1_{FP32[0].name}", stage=stage, recipe=BASE
            )
        for victim in (0, 1):
            found[f"no_space_{victim}"] = partial(checkpoint_cases.no_space, stage=1, recipe=BASE, victim=victim)
        found["rotation"] = partial(checkpoint_cases.rotating, recipe=BASE)
    return found


WORLDS = ("1", "3", "4", "2", "1b")
PLAN: dict[str, dict[str, Case]] = {
    world: _training_cases(world) | _checkpoint_cases(world) | _average_cases(world) for world in WORLDS
}
PLAN["2_failing"] = {"fine": cases.fine, "one_rank_raises": cases.one_rank_raises}
