"""Where a model is cut into pipeline stages, and who holds what."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dist_tfm.config.schema import ModelConfig
from dist_tfm.metrics.flops import LengthSums, forward_flops
from dist_tfm.model.transformer import Transformer
from dist_tfm.parallel.partition import (
    StagePlan,
    balance,
    balanced_plan,
    describe_plan,
    layer_costs,
)

SMALL = ModelConfig(encoder_layers=2, decoder_layers=2, d_model=8, d_ff=16, heads=2, norm="pre")
EVERY_CUT = [
    (0, *cuts, 4) for count in range(4) for cuts in itertools.combinations((1, 2, 3), count)
]  # of four layers into one to four stages


def brute_force(costs: list[int], stages: int) -> tuple[int, int]:
    """Smallest (largest sum, sum of squares) over all ways of cutting."""
    ways = itertools.combinations(range(1, len(costs)), stages - 1)
    sums = [[sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))] for cuts in ways]
    return min((max(s), sum(x * x for x in s)) for s in sums)


@pytest.mark.parametrize(
    "costs", [[1] * 7, [1, 1, 1, 9], [5, 1, 1, 1, 1, 5], [3, 3, 3, 5, 5, 5, 2], [10, 1, 1, 1, 1, 1, 1, 14]]
)
def test_balance_finds_the_best_cuts(costs: list[int]) -> None:
    for stages in range(1, len(costs) + 1):
        cuts = balance(costs, stages)
        assert len(cuts) == stages + 1
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(cuts)]
        assert (max(sums), sum(s * s for s in sums)) == brute_force(costs, stages)


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_without_a_layer_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="one for each layer"):
        balance([1, 2, 3], stages)


@pytest.mark.parametrize(
    "model",
    [SMALL, replace(SMALL, kv_heads=1, activation="swiglu", encoder_layers=5), replace(SMALL, d_k=3, d_v=7, heads=4)],
)
def test_costs_of_layers_add_up_to_the_flops_of_a_forward_pass(model: ModelConfig) -> None:
    length, vocab_size = 13, 50
    costs = layer_costs(model, vocab_size, length)
    whole = model.encoder_layers * costs.encoder_layer + model.decoder_layers * costs.decoder_layer + costs.projection
    square = length * length
    assert whole == forward_flops(model, vocab_size, LengthSums(length, length, square, square, square))


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    base = ModelConfig()  # 6 + 6 layers
    assert balanced_plan(base, 1_000, 4).boundaries == (0, 4, 7, 10, 12)
    few = balanced_plan(base, 37_000, 4)
    assert len(few.decoder_layers(3)) < len(balanced_plan(base, 1_000, 2).decoder_layers(1))
    assert few.boundaries[-2] >= 10
    assert balanced_plan(base, 1_000_000, 3).boundaries[-2] == 11  # one layer it must keep


@pytest.mark.parametrize("boundaries", [(0,), (0, 3), (1, 4), (0, 2, 2, 4), (0, 3, 2, 4), (0, 5)])
def test_impossible_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rise from 0 to 4"):
        StagePlan(SMALL, boundaries)


@pytest.mark.parametrize("boundaries", EVERY_CUT)
def test_every_layer_is_on_one_stage_and_what_is_sent_is_received(boundaries: tuple[int, ...]) -> None:
    plan = StagePlan(SMALL, boundaries)
    stages = range(plan.stages)
    assert [i for s in stages for i in plan.encoder_layers(s)] == [0, 1]
    assert [i for s in stages for i in plan.decoder_layers(s)] == [0, 1]
    assert plan.received(0) == plan.sent(plan.last) == ()
    for stage in stages[1:]:
        inside_decoder = plan.boundaries[stage] > 2
        assert plan.received(stage) == plan.sent(stage - 1) == (("source", "target") if inside_decoder else ("source",))
    assert 0 in plan.decoder_layers(plan.target_stage)


@pytest.mark.parametrize("tied", ["all", "decoder", "none"])
@pytest.mark.parametrize("boundaries", EVERY_CUT)
def test_every_parameter_has_its_holders(boundaries: tuple[int, ...], tied: Any) -> None:
    model = replace(SMALL, tied=tied, positions="learned")
    plan = StagePlan(model, boundaries)
    last, target = plan.last, plan.target_stage
    with torch.device("meta"):
        names = [name for name, _ in Transformer(model, 10).named_parameters()]
    holders = {name: plan.holders(name) for name in names}
    embedding = {"all": {0, target, last}, "decoder": {target, last}, "none": {target}}[tied]
    assert set(holders["embedding.weight"]) == embedding
    assert set(holders["embedding.positions.weight"]) == ({0, target} if tied == "all" else {target})
    assert holders["encoder.norm.weight"] == holders["encoder.layers.1.feed_forward.up.weight"]
    assert holders["decoder.norm.weight"] == (last,)
    if tied != "all":
        assert holders["source_embedding.weight"] == (0,)
    if tied == "none":
        assert holders["projection.weight"] == (last,)
    shared = {h for h in holders.values() if len(h) > 1}
    assert set(plan.tied_stages) == shared
    assert all(list(h) == sorted(set(h)) for h in holders.values())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="canonical name"):
        StagePlan(SMALL, (0, 4)).holders("encoder.bridge.weight")


def test_the_table_names_what_each_stage_holds_and_costs() -> None:
    lines = describe_plan(StagePlan(SMALL, (0, 1, 3, 4)), 50, micro_batches=4)
    assert len(lines) == 4
    assert "3 stages" in lines[0]
    assert "source embedding, encoder 0 " in lines[1]
    assert "encoder 1, decoder 0, target embedding" in lines[2]
    assert "decoder 1, projection" in lines[3]
    assert sum(float(line.split()[-1].rstrip("%")) for line in lines[1:]) == pytest.approx(100, abs=0.2)


def test_the_table_tells_the_idle_time() -> None:
    plan = StagePlan(replace(SMALL, encoder_layers=1, decoder_layers=1), (0, 1, 2))
    costs = layer_costs(plan.model, 1)
    slowest = costs.decoder_layer + costs.projection
    # Four micro-batches at the pace of the slowest stage, and once more to fill and empty the pipeline.
    expected = 1 - (costs.encoder_layer + slowest) * 4 / (2 * slowest * (4 + 2 - 1))
    assert f"{expected:.0%} of the time" in describe_plan(plan, 1, micro_batches=4)[0]
