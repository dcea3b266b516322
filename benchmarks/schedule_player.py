"""Plays the schedules of pipeline stages against a clock, without computing anything."""

from collections.abc import Callable, Sequence

from dist_tfm.parallel.schedule import Action, Backward, Exchange, Forward, Parcel, one_forward_one_backward, peer

Cost = Callable[[int, Forward | Backward], float]
"""Seconds that a stage takes for a pass."""


def play(plans: Sequence[Sequence[Action]], cost: Cost) -> list[float]:
    """When each stage is done with its plan.

    A message takes no time, but is done only once both ends have begun their exchange: the strictest network there is.
    Raises RuntimeError where no stage can go on, and where the two ends of a message disagree about what it is.
    """
    clock, places = [0.0] * len(plans), [0] * len(plans)
    ends: dict[tuple[int, int, Parcel, bool], float] = {}
    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            if places[stage] == len(plan):
                continue
            action = plan[places[stage]]
            if not isinstance(action, Exchange):
                clock[stage] += cost(stage, action)
                places[stage] += 1
                moved = True
                continue
            mine = [(stage, peer(stage, p, True), p, True) for p in action.send]
            mine += [(peer(stage, p, False), stage, p, False) for p in action.receive]
            for end in mine:
                if end not in ends:
                    ends[end] = clock[stage]
                    moved = True
            theirs = [(sender, receiver, parcel, not sends) for sender, receiver, parcel, sends in mine]
            if all(end in ends for end in theirs):
                clock[stage] = max([clock[stage], *(ends[end] for end in theirs)])
                places[stage] += 1
                moved = True
    if places != [len(plan) for plan in plans]:
        raise RuntimeError("the stages wait for each other for ever")
    return clock


def idle_fraction(stages: int, micro_batches: int, cost: Cost) -> float:
    """Share of the time of all stages in which they wait, from the first stage's beginning to the last one's end."""
    plans = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    busy = sum(cost(s, a) for s, plan in enumerate(plans) for a in plan if not isinstance(a, Exchange))
    return 1 - busy / (stages * max(play(plans, cost)))
