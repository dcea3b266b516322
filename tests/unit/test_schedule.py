"""Learning rates by update, against the paper's formula and their own documentation."""

import pytest

from dist_tfm.config.schema import ScheduleConfig
from dist_tfm.training.schedule import rate_function


@pytest.mark.parametrize("update", [1, 2, 3999, 4000, 4001, 100_000])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_noam_is_the_papers_equation(update: int, factor: float) -> None:
    rate = rate_function(ScheduleConfig(kind="noam", warmup=4000, factor=factor), d_model=512)
    assert rate(update) == pytest.approx(factor * 512**-0.5 * min(update**-0.5, update * 4000**-1.5), rel=1e-12)


def test_noam_values_of_the_base_model() -> None:
    rate = rate_function(ScheduleConfig(), d_model=512)
    assert rate(1) == pytest.approx(1.7469e-7, rel=1e-4)
    assert rate(4000) == pytest.approx(6.9877e-4, rel=1e-4)
    assert rate(16_000) == pytest.approx(rate(4000) / 2, rel=1e-12)


@pytest.mark.parametrize("kind", ["noam", "inverse_sqrt"])
def test_rates_rise_to_the_peak_at_the_end_of_warmup_and_fall_after(kind: str) -> None:
    rate = rate_function(ScheduleConfig(kind=kind, warmup=10, peak=0.5), d_model=64)  # type: ignore[arg-type]
    rates = [rate(update) for update in range(1, 41)]
    assert rates[:10] == sorted(set(rates[:10]))
    assert rates[9:] == sorted(set(rates[9:]), reverse=True)
    assert rate(5) == pytest.approx(rate(10) / 2)
    assert rate(40) == pytest.approx(rate(10) / 2)


def test_inverse_sqrt_peaks_at_its_peak_whatever_the_width() -> None:
    schedule = ScheduleConfig(kind="inverse_sqrt", warmup=400, peak=2e-3, factor=7.0)
    assert rate_function(schedule, 256)(400) == rate_function(schedule, 1024)(400) == 2e-3
    assert rate_function(schedule, 256)(1) == pytest.approx(2e-3 / 400)
    assert rate_function(schedule, 256)(1600) == pytest.approx(1e-3)


@pytest.mark.parametrize("update", [0, -1])
def test_updates_count_from_one(update: int) -> None:
    with pytest.raises(ValueError, match=f"1 or more, found {update}"):
        rate_function(ScheduleConfig(), 512)(update)
