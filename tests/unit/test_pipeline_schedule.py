"""The 1F1B schedule as data: it is complete, cannot deadlock, holds few activations, and idles as the formula says."""

import itertools

import pytest

from benchmarks.schedule_player import Cost, idle_fraction, play
from dist_tfm.parallel.schedule import (
    Action,
    Backward,
    Exchange,
    Forward,
    Parcel,
    forward_only,
    one_forward_one_backward,
)

SIZES = list(itertools.product(range(1, 7), range(1, 9)))


def plans_of(stages: int, micro_batches: int) -> list[list[Action]]:
    return [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_stage_passes_every_micro_batch_once_in_order(stages: int, micro_batches: int) -> None:
    everything = list(range(micro_batches))
    for plan in plans_of(stages, micro_batches):
        assert [a.index for a in plan if isinstance(a, Forward)] == everything
        assert [a.index for a in plan if isinstance(a, Backward)] == everything
        held = 0
        for action in plan:
            held += isinstance(action, Forward) - isinstance(action, Backward)
            assert held >= 0


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_stage_k_holds_at_most_p_minus_k_micro_batches(stages: int, micro_batches: int) -> None:
    for stage, plan in enumerate(plans_of(stages, micro_batches)):
        steps = [isinstance(a, Forward) - isinstance(a, Backward) for a in plan]
        assert max(itertools.accumulate(steps)) == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_nothing_is_used_before_it_arrives_or_sent_before_it_is_made(stages: int, micro_batches: int) -> None:
    for stage, plan in enumerate(plans_of(stages, micro_batches)):
        seen: set[object] = set()
        for action in plan:
            if isinstance(action, Forward):
                assert stage == 0 or Parcel("activations", action.index) in seen
            elif isinstance(action, Backward):
                assert Forward(action.index) in seen
                assert stage == stages - 1 or Parcel("gradients", action.index) in seen
            else:
                made = {"activations": Forward, "gradients": Backward}
                assert all(made[parcel.kind](parcel.index) in seen for parcel in action.send)
                assert seen.isdisjoint(action.receive)
                seen.update(action.receive)
            seen.add(action)


def even(backward: float) -> Cost:
    """All stages alike."""
    return lambda stage, action: 1.0 if isinstance(action, Forward) else backward


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_stages_never_deadlock_and_idle_as_the_formula_says(stages: int, micro_batches: int, backward: float) -> None:
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert idle_fraction(stages, micro_batches, even(backward)) == pytest.approx(expected)


def test_others_wait_for_a_slower_stage() -> None:
    def cost(stage: int, action: Forward | Backward) -> float:
        return even(2.0)(stage, action) * (2.0 if stage == 1 else 1.0)

    # The slow one works from the end of the first forward pass to the beginning of the last backward pass.
    done = play(plans_of(2, 4), cost)
    assert max(done) == 1.0 + 4 * 6.0 + 2.0
    assert idle_fraction(2, 4, cost) == pytest.approx(1 - (4 * 3.0 + 4 * 6.0) / (2 * 27.0))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_evaluation_never_deadlocks(stages: int, micro_batches: int) -> None:
    plans = [forward_only(stage, stages, micro_batches) for stage in range(stages)]
    play(plans, even(2.0))
    for plan in plans:
        assert [a.index for a in plan if isinstance(a, Forward)] == list(range(micro_batches))
        assert not any(isinstance(a, Backward) for a in plan)


def test_the_player_notices_a_deadlock() -> None:
    first: list[Action] = [Exchange((), (Parcel("gradients", 0),)), Exchange((Parcel("activations", 0),), ())]
    second: list[Action] = [Exchange((), (Parcel("activations", 0),)), Exchange((Parcel("gradients", 0),), ())]
    with pytest.raises(RuntimeError, match="for ever"):
        play([first, second], even(1.0))
    together: list[Action] = [Exchange((Parcel("activations", 0),), (Parcel("gradients", 0),))]
    play([together, [Exchange((Parcel("gradients", 0),), (Parcel("activations", 0),))]], even(1.0))
