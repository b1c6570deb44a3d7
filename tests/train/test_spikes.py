"""The spike rule is a pure function of the steps before, so an interruption does not change it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gecko.train import SkipSettings
from gecko.train.step import SpikeRule

SETTINGS = SkipSettings(deviations=6.0, window=32)
steady = st.lists(st.tuples(st.floats(2.0, 3.0), st.floats(0.5, 1.5)), min_size=16, max_size=80)


@given(steady)
def test_steps_like_those_before_are_taken(steps: list[tuple[float, float]]) -> None:
    """None of 32 values in an interval is more than √31 standard deviations from their mean."""
    rule = SpikeRule(SkipSettings(deviations=math.sqrt(80), window=80))
    steps = [*steps[:2], *steps]
    rule.losses.extend([2.0, 3.0])
    rule.grad_norms.extend([0.5, 1.5])
    assert [rule.judge(*step) for step in steps] == [None] * len(steps)


@given(steady, st.sampled_from(["loss", "gradient norm"]))
def test_what_stands_out_by_either_number_is_a_spike(steps: list[tuple[float, float]], which: str) -> None:
    rule = SpikeRule(SETTINGS)
    for step in steps:
        rule.judge(*step)
    found = rule.judge(100.0, 1.0) if which == "loss" else rule.judge(2.5, 100.0)
    assert found is not None and found.startswith(f"the {which} 100 is more than 6 standard deviations")


@given(steady)
def test_low_is_never_a_spike(steps: list[tuple[float, float]]) -> None:
    rule = SpikeRule(SETTINGS)
    for step in steps:
        rule.judge(*step)
    assert rule.judge(-1000.0, 0.0) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=100), st.integers(0, 100))
def test_a_rule_goes_on_from_what_it_remembered(steps: list[tuple[float, float]], cut: int) -> None:
    whole, first = SpikeRule(SETTINGS), SpikeRule(SETTINGS)
    expected = [whole.judge(*step) for step in steps]
    got = [first.judge(*step) for step in steps[:cut]]
    second = SpikeRule(SETTINGS, tuple(first.losses), tuple(first.grad_norms))
    assert [*got, *(second.judge(*step) for step in steps[cut:])] == expected


@given(steady, st.sampled_from([(100.0, 1.0), (2.5, 100.0)]))
def test_a_resumed_rule_still_knows_a_spike(steps: list[tuple[float, float]], spike: tuple[float, float]) -> None:
    whole = SpikeRule(SETTINGS)
    for step in steps:
        whole.judge(*step)
    resumed = SpikeRule(SETTINGS, tuple(whole.losses), tuple(whole.grad_norms))
    found = resumed.judge(*spike)
    assert found is not None and found == whole.judge(*spike)


def test_nothing_is_a_spike_without_enough_steps_before() -> None:
    rule = SpikeRule(SETTINGS)
    assert [rule.judge(loss, 1.0) for loss in [1.0, 1e9] * 8] == [None] * 16


def test_a_loss_that_moved_for_good_is_accepted_in_the_end() -> None:
    rule = SpikeRule(SETTINGS)
    for loss in np.linspace(2, 2.1, 32):
        rule.judge(float(loss), 1.0)
    skipped = [rule.judge(5.0, 1.0) is not None for _ in range(10)]
    assert skipped[0] and not skipped[-1]


def test_none_turns_the_rule_off() -> None:
    rule = SpikeRule(SkipSettings(deviations=None))
    assert not any(rule.judge(loss, 1.0) for loss in [1.0, 1.1] * 100 + [1e9])


@pytest.mark.parametrize("loss", [2.0, 3.0])
def test_a_window_of_one_value_has_no_deviation_to_exceed(loss: float) -> None:
    rule = SpikeRule(SETTINGS)
    for _ in range(32):
        rule.judge(2.0, 1.0)
    assert (rule.judge(loss, 1.0) is None) is (loss == 2.0)
