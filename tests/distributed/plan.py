"""Which cases run in which world. A world is named by its size and, where it is a second one of that size, a letter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dist_tfm.parallel.topology import Topology
from tests import compiler
from tests.distributed import average_cases, cases, checkpoint_cases, recomputation_cases, tensor_cases
from tests.distributed.build import arranged
from tests.distributed.pipeline_plan import PIPELINE_AFTER, PIPELINE_WORLDS
from tests.oracle import Recipe

Case = Callable[[Topology, Path], Any]


class Exact(NamedTuple):
    """A run that is compared with the oracle's."""

    stage: int
    recipe: Recipe
    checkpointing: bool = False
    tp: int = 1
    native: bool = False

    @property
    def name(self) -> str:
        recipe, extra = self.recipe, "_recomputed" * self.checkpointing + "_native" * self.native
        divided = f"_tp{self.tp}" if self.tp > 1 else ""
        modern = "_modern" if recipe.modern else ""
        return f"{recipe.norm}{modern}_{recipe.precision}_m{recipe.micro_batches}_stage{self.stage}{extra}{divided}"

    def on(self, case: Case) -> Case:
        """The case on a world laid out as this run wants it."""
        return partial(_on_grid, case=case, tp=self.tp)


def _on_grid(topology: Topology, folder: Path, case: Case, tp: int) -> Any:
    return case(arranged(topology, tp), folder)


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
# Variants of BASE, whose ten steps say that nothing drifts, take fewer: two past their checkpoint.
SHORT = replace(BASE, norm="pre", steps=7)
# A table of relative positions, an output matrix and its bias, which ZeRO must gather where they are read.
MODERN = replace(SHORT, micro_batches=2, modern=True)
PRE = {count: replace(SHORT, micro_batches=count) for count in (2, 5)}

# No number of tensor-parallel ranks divides 101 tokens.
ODD = replace(SHORT, micro_batches=5, vocabulary=101)
TP2 = [Exact(stage, BASE, tp=2) for stage in (0, 1, 2)]
TP4 = Exact(0, ODD, tp=4)
TP2_BF16 = [exact._replace(tp=2) for exact in BF16[:2]]

EXACT: dict[str, list[Exact]] = {
    "1": [*FP32, BF16[0], BF16[1], BF16[3], Exact(1, PRE[2])],
    "3": [*FP32, BF16[1], Exact(1, PRE[5]), Exact(3, PRE[2])],  # two micro-batches: a rank that has only a filler
    "4": [*FP32, Exact(2, PRE[5]), Exact(1, PRE[2]), *TP2, Exact(1, ODD, tp=2), TP4],
    "2": [
        *(*FP32, *BF16, Exact(3, PRE[2]), Exact(1, PRE[5]), Exact(2, PRE[2], True)),
        *(Exact(2, MODERN), Exact(3, MODERN), Exact(3, MODERN, True)),
        *(*TP2, *TP2_BF16, Exact(1, ODD, True, tp=2), Exact(2, PRE[2], tp=2)),
    ],
}

NATIVE: dict[str, list[Exact]] = {
    "1": [e._replace(native=True) for e in (*FP32, BF16[0], BF16[1], BF16[3])],
    "2": [e._replace(native=True) for e in (FP32[0], BF16[1], BF16[2], TP2[0], TP2_BF16[1])],
}
"""Runs whose Adam is a compiled kernel, beside runs of `EXACT` with torch's: worlds have them where a compiler is."""

LOADS: dict[str, list[Load]] = {
    "3": [Load(1, FP32[1], FP32[3]), Load(1, FP32[0], FP32[2]), Load(3, FP32[2], FP32[2])],
    "4": [
        *(Load(3, FP32[1], FP32[0]), Load(3, FP32[3], FP32[1]), Load(1, FP32[2], FP32[3])),
        *(Load(1, FP32[1], Exact(1, BASE, tp=4)), Load(3, FP32[3], TP2[2])),
    ],
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
        Load(2, TP2[1], TP2[1]),
        Load(1, FP32[0], TP2[1]),
        Load(4, TP4, Exact(2, ODD, tp=2)),
        Load(4, TP2[2], FP32[3]),
        Load(1, BF16[1], TP2_BF16[1]),
    ],
    "1b": [
        Load(1, FP32[3], FP32[3]),
        Load(2, FP32[1], FP32[0]),
        Load(2, FP32[3], FP32[2]),
        Load(3, FP32[2], FP32[1]),
        Load(4, FP32[0], FP32[1]),
        Load(4, FP32[2], FP32[3]),
        Load(2, BF16[3], BF16[3]),
        Load(2, TP2[1], FP32[2]),
        Load(4, TP4, Exact(1, ODD)),
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
        *((exact, "loss", "inf") for exact in (FP32[0], FP32[3])),
        *((TP2[0], "gradient", "nan"), (TP2[1], "loss", "nan")),
    ],
    "3": [(FP32[3], "loss", "nan")],
    "4": [(FP32[1], "gradient", "inf")],
}

DAMAGES = ("flipped_byte", "truncated", "missing_file", "edited_manifest", "no_marker", "unfinished")

BYTES = {"2": (0, 1, 2, 3), "4": (1, 2, 3)}

EVALUATED: dict[str, list[Exact]] = {
    "1": [FP32[0]],
    "2": [FP32[1], FP32[3], BF16[0], BF16[1], TP2[1]],
    "3": [FP32[3]],
    "4": [Exact(1, ODD, tp=2)],
}

AVERAGED: dict[str, list[Exact]] = {"1": [FP32[1]], "3": [FP32[3]], "2": [*FP32, BF16[1], TP2[1]]}
"""Runs with a moving average of their weights."""

NATIVE_AVERAGED: dict[str, list[Exact]] = {"1": [NATIVE["1"][5]]}
"""One of `NATIVE` in bf16 at stage 1, where masters change in other ways than by an update too."""

AVERAGES_LOADED: dict[str, list[tuple[int, Exact, int]]] = {
    "2": [(3, FP32[3], 1), (1, FP32[1], 3), (3, FP32[3], 0)],
    "1b": [(2, FP32[0], 2), (2, BF16[1], 1), (2, TP2[1], 2)],
}
"""(ranks that wrote a checkpoint of such a run, how, the stage that it is loaded into)."""

TENSOR = {"2": 2, "4": 2}
"""Worlds that have cases of tensor parallelism alone, and over how many ranks."""

RECOMPUTED_STAGES = (3,)
"""ZeRO stages under which parts of layers are computed again, in world 2: the one whose parameters come and go."""

ROUNDED_ALIKE = ("1", "3", "2")
"""Worlds whose first bf16 gradient is rounded as the oracle's is."""

AFTER = {"3": ("1",), "4": ("3",), "2": ("4",), "1b": ("2",), **PIPELINE_AFTER}
"""Worlds whose checkpoints a world loads."""


def skip_name(exact: Exact, what: str, value: str) -> str:
    return f"skip_{what}_{value}_{exact.name}"


def _training_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for e in (*EXACT.get(world, ()), *(NATIVE.get(world, ()) if compiler.FOUND else ())):
        settings: dict[str, Any] = {"checkpointing": e.checkpointing, "native": e.native}
        found[e.name] = e.on(partial(cases.exact, name=e.name, stage=e.stage, recipe=e.recipe, **settings))
    for e in EVALUATED.get(world, ()):
        name = f"evaluate_{e.name}"
        found[name] = e.on(partial(cases.evaluating, name=name, stage=e.stage, recipe=e.recipe))
    for e, what, value in SKIPS.get(world, ()):
        found[skip_name(e, what, value)] = e.on(
            partial(cases.skipping, stage=e.stage, recipe=e.recipe, what=what, value=value)
        )
    if world in ROUNDED_ALIKE:
        found["first_gradient"] = partial(cases.first_gradient, name="first_gradient", stage=1, recipe=BF16[1].recipe)
    for stage in BYTES.get(world, ()):
        found[f"bytes_stage{stage}"] = partial(cases.divided_bytes, stage=stage, recipe=BASE)
    if world == "2":
        for fault in MUTANTS:
            found[fault] = partial(cases.mutant, name=fault, stage=1, recipe=BASE, fault=fault)
        found["linear"] = partial(cases.linear_is_restored, recipe=BASE)
        recipe = replace(BASE, attention_dropout=0.2, micro_batches=2)
        for stage in RECOMPUTED_STAGES:
            found[f"recomputing_stage{stage}"] = partial(recomputation_cases.recomputing, stage=stage, recipe=recipe)
    return found


def _average_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for e in AVERAGED.get(world, ()):
        found[f"average_{e.name}"] = e.on(partial(average_cases.averaging, name=e.name, stage=e.stage, recipe=e.recipe))
    for e in NATIVE_AVERAGED.get(world, ()) if compiler.FOUND else ():
        name = f"average_{e.name}"
        found[name] = e.on(
            partial(average_cases.averaging, name=e.name, stage=e.stage, recipe=e.recipe, native=e.native)
        )
    for source, written, stage in AVERAGES_LOADED.get(world, ()):
        found[f"average_load_{source}_{written.name}_stage{stage}"] = partial(
            average_cases.loading, source=source, written=written.name, stage=stage, recipe=written.recipe
        )
    return found


def _tensor_cases(world: str) -> dict[str, Case]:
    if world not in TENSOR:
        return {}
    e = Exact(1, BASE, tp=TENSOR[world])
    found: dict[str, Case] = {"tensor_bytes": e.on(partial(tensor_cases.held_bytes, recipe=BASE))}
    if world == "2":
        found["data_bytes"] = partial(tensor_cases.held_bytes, recipe=BASE)
        dropped = replace(BASE, attention_dropout=0.2)
        found["tensor_dropout"] = e.on(partial(tensor_cases.dropping, recipe=dropped))
        found["tensor_mutants"] = e.on(partial(tensor_cases.mutants, recipe=BASE))
        found["tensor_too_large"] = e.on(partial(tensor_cases.too_large, recipe=BASE))
    return found


def _checkpoint_cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for load in LOADS.get(world, ()):
        e = load.loaded
        found[load.name] = e.on(
            partial(checkpoint_cases.loading, source=load.run, stage=e.stage, recipe=e.recipe, name=load.name)
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
    world: _training_cases(world) | _tensor_cases(world) | _checkpoint_cases(world) | _average_cases(world)
    for world in WORLDS
}
PLAN |= PIPELINE_WORLDS
PLAN["2_failing"] = {"fine": cases.fine, "one_rank_raises": cases.one_rank_raises}
