"""Learning rate over a run: bounds, shape and end of both schedules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.train import ScheduleSettings
from gecko.train.step import learning_rate_factor

fractions = st.floats(0, 0.5)
kinds = st.sampled_from(["cosine", "wsd"])


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSettings:
    return ScheduleSettings(draw(kinds), warmup=draw(fractions), decay=draw(fractions), final=draw(fractions))


def curve(schedule: ScheduleSettings, steps: int) -> list[float]:
    return [learning_rate_factor(schedule, step, steps) for step in range(steps)]


@given(schedules(), st.integers(1, 300))
def test_climbs_to_one_then_never_rises(schedule: ScheduleSettings, steps: int) -> None:
    factors = curve(schedule, steps)
    warmup = round(schedule.warmup * steps)
    assert all(0 < factor <= 1 for factor in factors if schedule.final > 0)
    assert factors[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert all(later <= earlier for earlier, later in zip(factors[warmup:], factors[warmup + 1 :], strict=False))
    if warmup < steps:
        assert max(factors) == pytest.approx(1)


@given(schedules())
def test_ends_near_the_final_factor(schedule: ScheduleSettings) -> None:
    steps = 10_000
    last = learning_rate_factor(schedule, steps - 1, steps)
    if schedule.kind == "cosine" or schedule.decay * steps > 1000:
        assert last == pytest.approx(schedule.final, abs=2e-3)


def test_wsd_is_flat_between_warmup_and_decay() -> None:
    factors = curve(ScheduleSettings("wsd", warmup=0.1, decay=0.2, final=0.0), 100)
    assert factors[10:81] == [1.0] * 71
    assert factors[90] == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle() -> None:
    factors = curve(ScheduleSettings("cosine", warmup=0.0, final=0.2), 100)
    assert factors[50] == pytest.approx(0.6)


@pytest.mark.parametrize("step", [-1, 10])
def test_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.9"):
        learning_rate_factor(ScheduleSettings(), step, 10)
