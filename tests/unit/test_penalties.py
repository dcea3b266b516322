"""Length penalties against their formulas, and the bound against everything that could still happen."""

import itertools

import numpy as np
import pytest

from dist_tfm.inference.penalties import LengthPenalty, PenaltyName, length_penalty


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_gnmt_is_the_formula_of_the_paper() -> None:
    """((5 + |Y|) / 6)^alpha: 1 at one token, whatever alpha; 1.5^0.6 at four tokens."""
    penalty = length_penalty("gnmt", 0.6)
    assert penalty.divisor(numbers(1, 4, 13)) == pytest.approx([1.0, 1.5**0.6, 3.0**0.6])
    assert penalty.normalise(numbers(-6.0), numbers(13)) == pytest.approx([-6.0 / 3.0**0.6])
    assert length_penalty("gnmt", 0.0).divisor(numbers(1, 50)) == pytest.approx([1.0, 1.0])


def test_average_divides_by_the_length_and_none_by_nothing() -> None:
    assert length_penalty("average").normalise(numbers(-6.0, -6.0), numbers(1, 4)) == pytest.approx([-6.0, -1.5])
    assert length_penalty("none").normalise(numbers(-6.0, -6.0), numbers(1, 4)) == pytest.approx([-6.0, -6.0])


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="gnmt, average or none, found 'wu'"):
        length_penalty("wu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "penalty",
    [
        pytest.param(length_penalty("none"), id="none"),
        pytest.param(length_penalty("average"), id="average"),
        pytest.param(length_penalty("gnmt", 0.6), id="gnmt"),
        pytest.param(length_penalty("gnmt", 2.5), id="gnmt-steep"),
        pytest.param(length_penalty("gnmt", -0.7), id="gnmt-against-length"),
    ],
)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_completion_beats_the_bound_and_one_reaches_it(penalty: LengthPenalty, sign: float) -> None:
    """Whatever the sign of the score and the direction of the penalty."""
    for score, shortest, extra in itertools.product((0.1, 1.0, 7.0), (1, 2, 9), (0, 1, 20)):
        lengths = np.arange(shortest, shortest + extra + 1, dtype=np.float64)
        reachable = penalty.normalise(np.full(len(lengths), sign * score), lengths)
        bound = penalty.bound(numbers(sign * score), numbers(shortest), numbers(shortest + extra))
        assert bound == pytest.approx([reachable.max()])


@pytest.mark.parametrize(("name", "better"), [("gnmt", True), ("average", True), ("none", False)])
def test_penalties_lift_long_hypotheses(name: PenaltyName, better: bool) -> None:
    """Twice as long at a third more of log-probability wins, but not without a penalty."""
    scores = length_penalty(name, 1.0).normalise(numbers(-3.0, -4.0), numbers(10, 20))
    assert (scores[1] > scores[0]) == better
