"""Pipelines alone, with replicas and with divided layers, against the single-process oracle; dropout is on.

The mutants at the end show that the comparison can fail.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from dist_tfm.parallel.grid import Grid
from dist_tfm.parallel.partition import StagePlan
from tests.distributed.build import whole_shapes
from tests.distributed.cases import GO_ON, SAVE_STEP, evaluated_batch
from tests.distributed.compare import BF16_TOLERANCE, FP32_TOLERANCE, Tolerance, measure
from tests.distributed.pipeline_cases import MUTANTS, Cut
from tests.distributed.pipeline_plan import EVALUATED, EXACT, LOADS, MUTATED, SKIPS, Load, evaluation_name, skip_name
from tests.distributed.world import Worlds
from tests.oracle import Recipe, build_model, summed_loss

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases

RUNS = [pytest.param(world, cut, id=f"{world}_{cut.name}") for world, cuts in EXACT.items() for cut in cuts]


def within(found: Tolerance, allowed: Tolerance) -> bool:
    return all(f <= a for f, a in zip(found, allowed, strict=True))


@pytest.mark.parametrize(("world", "cut"), RUNS)
def test_every_step_equals_the_oracle(worlds: Worlds, world: str, cut: Cut) -> None:
    by_rank = worlds.results(world, cut.name)
    found = measure(by_rank[0]["steps"], worlds.folder / f"{world}_{cut.name}.safetensors", cut.recipe)
    assert within(found, cut.tolerance), found
    assert all(result["steps"] == by_rank[0]["steps"] for result in by_rank)
    facts = by_rank[0]["facts"]
    assert (facts["pipeline_parallel"], facts["tensor_parallel"], facts["zero_stage"]) == (cut.pp, cut.tp, cut.stage)
    assert (facts["world_size"], facts["precision"]) == (int(world[0]), cut.recipe.precision)


@pytest.mark.parametrize(("world", "cut"), RUNS)
def test_one_backward_pass_for_each_micro_batch_on_each_stage(worlds: Worlds, world: str, cut: Cut) -> None:
    grid, plan = cut.grid(world), StagePlan(cut.recipe.model, cut.boundaries)
    passes = -(-cut.recipe.micro_batches // grid.dp) * cut.recipe.steps
    for rank, result in enumerate(worlds.results(world, cut.name)):
        stage = grid.place(rank).pipe
        layers = [2 + i for i in plan.encoder_layers(stage)] + [4 + i for i in plan.decoder_layers(stage)]
        embeddings = [0] * (stage == 0) + [1] * (stage == plan.target_stage)
        assert result["backwards"] == {str(number): passes for number in embeddings + layers}


@pytest.mark.parametrize(("world", "cut"), RUNS)
def test_all_holders_of_the_tied_embedding_have_the_same_bits(worlds: Worlds, world: str, cut: Cut) -> None:
    grid = cut.grid(world)
    holders = StagePlan(cut.recipe.model, cut.boundaries).holders("embedding.weight")
    by_shard: dict[int, list[dict[str, str]]] = {tensor: [] for tensor in range(grid.tp)}
    for rank, result in enumerate(worlds.results(world, cut.name)):
        place = grid.place(rank)
        assert bool(result["tied"]) == (place.pipe in holders)
        by_shard[place.tensor] += [result["tied"]] if result["tied"] else []
    for digests in by_shard.values():
        assert len(digests) >= 2 * grid.dp
        assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize(("world", "cut"), [run for run in RUNS if run.values[1].recipe.precision == "fp32"])
def test_a_rank_holds_its_part_alone_and_its_state_divided_over_replicas(worlds: Worlds, world: str, cut: Cut) -> None:
    grid, plan = cut.grid(world), StagePlan(cut.recipe.model, cut.boundaries)
    for rank, result in enumerate(worlds.results(world, cut.name)):
        mine = 4 * held_elements(plan, grid, rank)
        assert result["held"]["weights"] == mine
        assert result["held"]["gradients"] == pytest.approx(mine, rel=0.05)
        assert result["held"]["optimizer"] == pytest.approx(2 * mine / (grid.dp if cut.stage else 1), rel=0.05)


def held_elements(plan: StagePlan, grid: Grid, rank: int) -> int:
    """Elements of the parameters that a rank holds, by theory: of its stage, and of its shard of what is divided."""
    total = 0
    for name, shape in whole_shapes(Recipe(norm=plan.model.norm)).items():
        if grid.place(rank).pipe in plan.holders(name):
            replicated = "norm" in name or name.endswith("down.bias")
            total += math.prod(shape) // (1 if replicated else grid.tp)
    return total


@pytest.mark.parametrize(
    ("world", "load"), [pytest.param(w, load, id=load.name) for w, loads in LOADS.items() for load in loads]
)
def test_checkpoint_loads_into_another_layout(worlds: Worlds, world: str, load: Load) -> None:
    uninterrupted = worlds.results(load.world, load.written.name)[0]["steps"][SAVE_STEP : SAVE_STEP + GO_ON]
    results = worlds.results(world, load.name)
    assert all(result["identical"] for result in results)  # weights and moments, exported again before any step
    steps = results[0]["steps"]
    if load.written == load.loaded:
        assert steps == uninterrupted  # the same layout: the same floats, dropout included
        return
    tolerance = 1e-5 if load.written.recipe.precision == "fp32" else 2e-3
    for found, expected in zip(steps, uninterrupted, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert found["rate"] == expected["rate"]


@pytest.mark.parametrize(("cut", "what", "value"), [pytest.param(*skip, id=skip_name(*skip)) for skip in SKIPS])
def test_non_finite_step_is_skipped_by_all_stages(worlds: Worlds, cut: Cut, what: str, value: str) -> None:
    for result in worlds.results("2p", skip_name(cut, what, value)):
        assert result["applied"] == [True, False, True]
        assert result["norms"] == ["finite", "inf", "finite"]
        assert result["untouched"]
        assert result["as_if_never_seen"]


@pytest.mark.parametrize(
    ("world", "cut"),
    [pytest.param(world, cut, id=f"{world}_{cut.name}") for world, cuts in EVALUATED.items() for cut in cuts],
)
def test_evaluation_and_plain_module_use_the_current_weights(worlds: Worlds, world: str, cut: Cut) -> None:
    name = evaluation_name(world, cut)
    results = worlds.results(world, name)
    tensors = load_file(worlds.folder / f"{name}.safetensors")
    masters = {k.removeprefix("state/fp32/"): v for k, v in tensors.items() if k.startswith("state/")}
    plain = {k.removeprefix("plain/"): v for k, v in tensors.items() if k.startswith("plain/")}
    rounded = torch.float32 if cut.recipe.precision == "fp32" else torch.bfloat16
    assert set(plain) == set(masters)
    assert all(torch.equal(plain[key], masters[key].to(rounded).float()) for key in masters)
    assert len({result["digest"] for result in results}) == 1  # bit for bit the same module on every rank
    model, batch = build_model(cut.recipe).eval(), evaluated_batch()
    model.load_state_dict(masters)
    with torch.no_grad():
        logits = model.logits(model(torch.from_numpy(batch.source), torch.from_numpy(batch.target_in)))
        loss, nll = summed_loss(logits, torch.from_numpy(batch.labels), cut.recipe.smoothing)
    tolerance = 1e-5 if cut.recipe.precision == "fp32" else 3e-2
    replicas = cut.grid(world).dp
    for again in (0, 1):
        sums = [sum(result["sums"][again][i] for result in results) / replicas for i in range(3)]
        assert sums[0] == pytest.approx(float(loss), rel=tolerance)
        assert sums[1] == pytest.approx(float(nll), rel=tolerance)
        assert sums[2] == batch.target_tokens
    assert all(result["mode_kept"] for result in results)
    assert all(result["steps"] == results[0]["steps"] for result in results)


def test_evaluation_does_not_disturb_training(worlds: Worlds) -> None:
    cut = EVALUATED["2p"][0]
    evaluated = worlds.results("2p", evaluation_name("2p", cut))[0]["steps"]
    undisturbed = next(c for c in EXACT["2p"] if c.recipe == cut.recipe and c.boundaries == cut.boundaries)
    expected = worlds.results("2p", undisturbed.name)[0]["steps"][: len(evaluated)]
    for found, right in zip(evaluated, expected, strict=True):
        assert found["loss"] == pytest.approx(right["loss"], rel=1e-6)


@pytest.mark.parametrize("fault", MUTANTS)
def test_comparison_rejects_mutant(worlds: Worlds, fault: str) -> None:
    steps = worlds.results("2p", fault)[0]["steps"]
    found = measure(steps, worlds.folder / f"2p_{fault}.safetensors", MUTATED.recipe)
    assert max(f / a for f, a in zip(found, FP32_TOLERANCE, strict=True)) > 1000, found
    assert not within(found, BF16_TOLERANCE), found


def test_plans_cover_what_they_should() -> None:
    """Cuts in both stacks and at the border, both norms, accumulation 1, 2, 4, 5, both ZeRO stages, recomputation."""
    cuts = [cut for cuts in EXACT.values() for cut in cuts]
    assert {cut.boundaries for cut in cuts} == {(0, 1, 4), (0, 2, 4), (0, 3, 4), (0, 1, 2, 3, 4)}
    assert {cut.recipe.micro_batches for cut in cuts} == {1, 2, 4, 5}
    assert {cut.recipe.norm for cut in cuts} == {"post", "pre"}
    assert {cut.recipe.precision for cut in cuts} == {"fp32", "bf16", "bf16-autocast"}
    assert {cut.stage for cut in cuts} == {0, 1}
    assert any(cut.checkpointing for cut in cuts)
    grids = [cut.grid(world) for world, cuts in EXACT.items() for cut in cuts]
    assert {(1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)} <= {(g.tp, g.pp, g.dp) for g in grids}
    assert all(cut.recipe.model.dropout > 0 for cut in cuts)
