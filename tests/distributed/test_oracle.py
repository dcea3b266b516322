"""The engine against a plain single-process PyTorch loop: every ZeRO stage, 1 to 4 ranks, fp32 and bf16, dropout on.

Micro-batches hold sentences of 1 to 40 tokens; in every step one has a single target token and another 300. The mutants
at the end show that the comparison can fail.
"""

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.api import EOS, PAD
from tests.batches import share, step_batches, target_tokens
from tests.distributed.cases import evaluated_batch
from tests.distributed.compare import (
    BF16_TENSOR_TOLERANCE,
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    TOLERANCES,
    Tolerance,
    gradient_difference,
    measure,
    oracle,
)
from tests.distributed.plan import BASE, BF16, EVALUATED, EXACT, FP32, MUTANTS, ROUNDED_ALIKE, SKIPS, Exact, skip_name
from tests.distributed.world import Worlds
from tests.oracle import build_model, summed_loss

pytestmark = pytest.mark.timeout(1200)  # the first test of a world waits for all its cases

RUNS = [pytest.param(world, exact, id=f"{world}_ranks_{exact.name}") for world, runs in EXACT.items() for exact in runs]


def tolerance_of(exact: Exact) -> Tolerance:
    precision = exact.recipe.precision
    return BF16_TENSOR_TOLERANCE if exact.tp > 1 and precision != "fp32" else TOLERANCES[precision]


def within(found: Tolerance, allowed: Tolerance) -> bool:
    return all(f <= a for f, a in zip(found, allowed, strict=True))


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_every_step_equals_the_oracle(worlds: Worlds, world: str, exact: Exact) -> None:
    by_rank = worlds.results(world, exact.name)
    found = measure(by_rank[0]["steps"], worlds.folder / f"{world}_{exact.name}.safetensors", exact.recipe)
    assert within(found, tolerance_of(exact)), found
    # In bf16 too the master weights start from the very weights drawn, not from rounded ones.
    assert by_rank[0]["exact_start"]
    assert all(result["rounded"] for result in by_rank)
    # Loss, norm and rate are global: every rank must report the same ones.
    assert all(result["steps"] == by_rank[0]["steps"] for result in by_rank)


@pytest.mark.parametrize(("world", "exact"), RUNS)
def test_facts_say_what_runs(worlds: Worlds, world: str, exact: Exact) -> None:
    expected = {
        "attention": "sdpa" if exact.recipe.precision == "fp32" else "matmul",
        "precision": exact.recipe.precision,
        "zero_stage": exact.stage,
        "world_size": int(world),
        "tensor_parallel": exact.tp,
        "pipeline_parallel": 1,
        "device": "cpu",
        "kernels": "torch",
        "updates": exact.recipe.steps,
    }
    assert [result["facts"] for result in worlds.results(world, exact.name)] == [expected] * int(world)


def test_clipping_and_dropout_are_active_in_the_oracle() -> None:
    norms = oracle(BASE).norms
    assert norms[0] > 2 * BASE.clip  # the first gradient, which is compared, is a clipped one
    assert min(norms) < BASE.clip < max(norms)
    assert BASE.model.dropout > 0


@pytest.mark.parametrize("count", [2, 4, 5])
def test_batches_are_as_ragged_as_they_should_be(count: int) -> None:
    lengths = []
    for step in range(1, 11):
        batches = step_batches(step, count)
        tokens = [batch.target_tokens for batch in batches]
        assert {1, 300} <= set(tokens)
        assert sum(tokens) == target_tokens(batches)
        assert all(batch.labels[0, batch.target_lengths[0] - 1] == EOS for batch in batches)
        assert any((batch.labels == PAD).any() for batch in batches)
        lengths += [int(n) for batch in batches for n in batch.target_lengths]
        for ranks in (1, 2, 3, 4):
            shares = [share(batches, rank, ranks) for rank in range(ranks)]
            assert {len(s) for s in shares} == {-(-count // ranks)}
            assert sorted(b.index for s in shares for b in s if b.index >= 0) == list(range(count))
    assert min(lengths) == 1
    assert max(lengths) == 40


@pytest.mark.parametrize("fault", MUTANTS)
def test_comparison_rejects_mutant(worlds: Worlds, fault: str) -> None:
    steps = worlds.results("2", fault)[0]["steps"]
    found = measure(steps, worlds.folder / f"2_{fault}.safetensors", BASE)
    # A wrong divisor shows in the gradient's norm alone: clipping and Adam hide it from the rest.
    assert max(f / a for f, a in zip(found, FP32_TOLERANCE, strict=True)) > 1000, found
    # Even with the slack that bf16 is given, none of them passes.
    assert not within(found, BF16_TOLERANCE), found


@pytest.mark.parametrize("world", ROUNDED_ALIKE)
def test_bf16_gradients_are_accumulated_and_reduced_in_fp32(worlds: Worlds, world: str) -> None:
    """With whole logits stage 1 rounds as the oracle does up to each micro-batch's gradient. Were these then added up,
    or sent, in bf16, the sum over micro-batches and ranks would be 1e-3 off."""
    assert len(worlds.results(world, "first_gradient")) == int(world)
    state = load_file(worlds.folder / f"{world}_first_gradient.safetensors")
    assert gradient_difference(state, BF16[1].recipe) < 1e-5


@pytest.mark.parametrize(
    ("world", "exact", "what", "value"),
    [
        pytest.param(world, *skip, id=f"{world}_ranks_{skip_name(*skip)}")
        for world, skips in SKIPS.items()
        for skip in skips
    ],
)
def test_non_finite_step_is_skipped_by_all_ranks(
    worlds: Worlds, world: str, exact: Exact, what: str, value: str
) -> None:
    for result in worlds.results(world, skip_name(exact, what, value)):
        assert result["applied"] == [True, False, True]
        assert result["norms"][1] == "inf"
        assert "inf" not in (result["norms"][0], result["norms"][2])
        assert result["updates"] == 2
        # The schedule counts updates: the step after the skipped one trains at the rate that it would have had.
        assert result["rates"][2] == result["rates"][1] == pytest.approx(2 * result["rates"][0])
        assert result["untouched"]
        assert result["moved"]
        assert result["as_if_never_seen"]


@pytest.mark.parametrize("world", ["2", "4"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_is_divided_over_ranks(worlds: Worlds, world: str, stage: int) -> None:
    ranks = int(world)
    for result in worlds.results(world, f"bytes_stage{stage}"):
        # Master and two moments in fp32; at stage 1 in fp32 weights are their own masters.
        whole = (2 if stage == 1 else 3) * 4 * result["parameters"]
        assert whole / ranks <= result["bytes"] <= 1.02 * whole / ranks  # padding may add a little
        assert (result["local_parameters"] == 0) == (stage == 3)  # between steps stage 3 holds no whole weight


def test_optimizer_state_is_whole_at_stage_0(worlds: Worlds) -> None:
    for result in worlds.results("2", "bytes_stage0"):
        assert result["bytes"] == 2 * 4 * result["parameters"]


def test_closing_the_engine_puts_back_torch_linear(worlds: Worlds) -> None:
    assert worlds.results("2", "linear") == [{"replaced": True, "restored": True}] * 2


EVALUATIONS = [
    pytest.param(world, exact, id=f"{world}_ranks_{exact.name}") for world, runs in EVALUATED.items() for exact in runs
]


@pytest.mark.parametrize(("world", "exact"), EVALUATIONS)
def test_evaluation_does_not_disturb_training(worlds: Worlds, world: str, exact: Exact) -> None:
    for result in worlds.results(world, f"evaluate_{exact.name}"):
        assert result["mode_kept"]
        assert result["sums"][0] == result["sums"][1]  # no dropout
        undisturbed = worlds.results(world, exact.name)[0]["steps"]
        assert result["steps"] == undisturbed[: len(result["steps"])]


@pytest.mark.parametrize(("world", "exact"), EVALUATIONS)
def test_evaluation_and_plain_module_use_the_current_weights(worlds: Worlds, world: str, exact: Exact) -> None:
    name = f"evaluate_{exact.name}"
    results = worlds.results(world, name)
    tensors = load_file(worlds.folder / f"{world}_{name}.safetensors")
    model = build_model(exact.recipe).eval()
    model.load_state_dict({k.removeprefix("state/fp32/"): v for k, v in tensors.items() if k != "logits"})
    batch = evaluated_batch()
    with torch.no_grad():
        logits = model.logits(model(torch.from_numpy(batch.source), torch.from_numpy(batch.target_in)))
        loss, nll = summed_loss(logits, torch.from_numpy(batch.labels), exact.recipe.smoothing)
    tolerance = 1e-5 if exact.recipe.precision == "fp32" else 3e-2  # bf16: logits of 8 bits
    real = torch.from_numpy(batch.labels != 0)
    difference = (tensors["logits"] - logits)[real].norm() / logits[real].norm()
    assert float(difference) < tolerance
    for result in results:
        found_loss, found_nll, tokens = result["sums"][0]
        assert found_loss == pytest.approx(float(loss), rel=tolerance)
        assert found_nll == pytest.approx(float(nll), rel=tolerance)
        assert tokens == int(real.sum())
        assert result["logits"] == results[0]["logits"]  # bit for bit the same module on every rank


def test_plans_cover_what_they_should() -> None:
    """Stages 0 to 3 on 1 to 4 ranks in fp32; accumulation 1, 2 and 4; pre-norm on each; every bf16 stage on 2."""
    assert all(exact.recipe.steps == 10 for exact in FP32)
    for world, runs in EXACT.items():
        assert set(FP32) <= set(runs), world
        assert any(exact.recipe.norm == "pre" for exact in runs), world
    assert set(BF16) <= set(EXACT["2"])
    accumulation = {-(-exact.recipe.micro_batches // int(world)) for world, runs in EXACT.items() for exact in runs}
    assert {1, 2, 4} <= accumulation
    divided = {(int(world), e.tp, e.stage) for world, runs in EXACT.items() for e in runs if e.tp > 1}
    assert {(2, 2, 0), (2, 2, 1), (2, 2, 2), (4, 2, 0), (4, 2, 1), (4, 2, 2), (4, 4, 0)} <= divided
