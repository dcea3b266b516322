"""Which cases of pipeline parallelism run in which world. Recipes have two encoder and two decoder layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dist_tfm.parallel.topology import Topology
from tests.distributed import pipeline_cases as cases
from tests.distributed.pipeline_cases import Cut
from tests.oracle import Recipe

BASE = Recipe()  # post-norm, four micro-batches, dropout on
PRE = {count: replace(BASE, norm="pre", micro_batches=count, steps=7) for count in (1, 2, 5)}
BF16 = replace(BASE, precision="bf16")
AUTOCAST = replace(BASE, precision="bf16-autocast")

EXACT: dict[str, list[Cut]] = {
    "2p": [
        Cut((0, 1, 4), 1, BASE),  # inside the encoder
        Cut((0, 2, 4), 0, PRE[5]),  # between encoder and decoder
        Cut((0, 3, 4), 1, PRE[1], True),  # inside the decoder
        Cut((0, 3, 4), 0, PRE[2]),
        Cut((0, 3, 4), 1, BF16),
        Cut((0, 2, 4), 0, AUTOCAST),
    ],
    "4p": [
        Cut((0, 1, 2, 3, 4), 1, BASE),
        Cut((0, 1, 2, 3, 4), 0, PRE[5], True),
        Cut((0, 3, 4), 1, PRE[5]),  # two replicas, one of which has a filler
        Cut((0, 1, 4), 0, PRE[1]),  # two replicas, one of which has nothing but a filler
        Cut((0, 3, 4), 1, BF16),
        Cut((0, 3, 4), 1, BASE, tp=2),
        Cut((0, 1, 4), 0, PRE[2], True, tp=2),
    ],
    "8p": [
        Cut((0, 3, 4), 1, PRE[5], tp=2),  # three dimensions: 2 x 2 x 2
        Cut((0, 3, 4), 1, BASE),  # four replicas, over which sums depend on the order of additions
        Cut((0, 1, 2, 3, 4), 1, BF16, tp=2),
    ],
}


class Load(NamedTuple):
    """A checkpoint of a world's run, loaded by another layout."""

    world: str
    written: Cut
    loaded: Cut

    @property
    def name(self) -> str:
        return f"load_{self.world}_{self.written.name}_as_{self.loaded.name}"


TWO, FOUR = EXACT["2p"], EXACT["4p"]
LOADS: dict[str, list[Load]] = {
    "4p": [
        Load("2p", TWO[0], Cut((0, 1, 2, 3, 4), 0, BASE)),
        Load("2p", TWO[1], Cut((0, 3, 4), 1, PRE[5])),
        Load("2p", TWO[0], Cut((), 2, BASE)),  # no pipeline: four replicas
        Load("4p", FOUR[2], FOUR[2]),  # the same layout: bit for bit
        Load("4p", FOUR[4], Cut((0, 1, 2, 3, 4), 1, BF16)),
        Load("2p", TWO[0], Cut((0, 2, 4), 1, BASE, tp=2)),
        Load("4p", FOUR[5], Cut((0, 1, 2, 3, 4), 0, BASE)),
    ],
    "8p": [Load("4p", FOUR[2], Cut((0, 1, 4), 1, PRE[5], tp=2))],
}

MUTATED = Cut((0, 3, 4), 1, replace(BASE, steps=2))
SKIPS = [
    (Cut((0, 3, 4), stage, recipe), what, value)
    for stage, recipe, what, value in (
        (1, BASE, "gradient", "nan"),
        (0, BASE, "loss", "inf"),
        (1, BF16, "gradient", "inf"),
    )
]
EVALUATED = {"2p": [Cut((0, 3, 4), 1, PRE[2])], "4p": [Cut((0, 1, 4), 1, BF16), Cut((0, 3, 4), 1, PRE[2], tp=2)]}

Case = Callable[[Topology, Path], Any]


def skip_name(cut: Cut, what: str, value: str) -> str:
    return f"skip_{what}_{value}_{cut.name}"


def evaluation_name(world: str, cut: Cut) -> str:
    return f"{world}_evaluate_{cut.name}"


def _cases(world: str) -> dict[str, Case]:
    found: dict[str, Case] = {cut.name: partial(cases.exact, world=world, cut=cut) for cut in EXACT[world]}
    for load in LOADS.get(world, ()):
        source = cases.run_name(load.world, load.written)
        found[load.name] = partial(cases.loading, source=source, name=load.name, loaded=load.loaded)
    for cut in EVALUATED.get(world, ()):
        name = evaluation_name(world, cut)
        found[name] = partial(cases.evaluating, cut=cut, name=name)
    if world == "2p":
        for fault in cases.MUTANTS:
            found[fault] = partial(cases.mutant, world=world, cut=MUTATED, fault=fault)
        for cut, what, value in SKIPS:
            found[skip_name(cut, what, value)] = partial(cases.skipping, cut=cut, what=what, value=value)
    return found


PIPELINE_WORLDS = {world: _cases(world) for world in EXACT}
PIPELINE_AFTER = {"4p": ("2p",), "8p": ("4p",)}
