"""The spike rule is a pure function of the steps before, so an interruption does not change it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gecko.train import SkipSettings
from gecko.train.step import SpikeRule, StepResult, Verdict

SETTINGS = SkipSettings(deviations=6.0, window=32)
steady = st.lists(st.tuples(st.floats(2.0, 3.0), st.floats(0.5, 1.5)), min_size=16, max_size=80)


def judge(rule: SpikeRule, loss: float, norm: float) -> str | None:
    """Return why a step is a spike, or None if it is not. The host releases the rule at once."""
    verdict = rule.judge(*torch.tensor([loss, norm], dtype=torch.float64))
    rule.release()
    return rule.record(StepResult(loss, norm, Verdict(int(verdict))))


@given(steady)
def test_steps_like_those_before_are_taken(steps: list[tuple[float, float]]) -> None:
    """None of 32 values in an interval is more than √31 standard deviations from their mean."""
    rule = SpikeRule(SkipSettings(deviations=math.sqrt(80), window=80), [2.0, 3.0], [0.5, 1.5])
    steps = [*steps[:2], *steps]
    assert [judge(rule, *step) for step in steps] == [None] * len(steps)


@given(steady, st.sampled_from(["loss", "gradient norm"]))
def test_what_stands_out_by_either_number_is_a_spike(steps: list[tuple[float, float]], which: str) -> None:
    rule = SpikeRule(SETTINGS)
    for step in steps:
        judge(rule, *step)
    found = judge(rule, 100.0, 1.0) if which == "loss" else judge(rule, 2.5, 100.0)
    assert found is not None and found.startswith(f"the {which} 100 is more than 6 standard deviations")


@given(steady)
def test_low_is_never_a_spike(steps: list[tuple[float, float]]) -> None:
    rule = SpikeRule(SETTINGS)
    for step in steps:
        judge(rule, *step)
    assert judge(rule, -1000.0, 0.0) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=100), st.integers(0, 100))
def test_a_rule_goes_on_from_what_it_remembered(steps: list[tuple[float, float]], cut: int) -> None:
    whole, first = SpikeRule(SETTINGS), SpikeRule(SETTINGS)
    expected = [judge(whole, *step) for step in steps]
    got = [judge(first, *step) for step in steps[:cut]]
    second = SpikeRule(SETTINGS, tuple(first.losses), tuple(first.grad_norms))
    assert [*got, *(judge(second, *step) for step in steps[cut:])] == expected


@given(steady, st.sampled_from([(100.0, 1.0), (2.5, 100.0)]))
def test_a_resumed_rule_still_knows_a_spike(steps: list[tuple[float, float]], spike: tuple[float, float]) -> None:
    whole = SpikeRule(SETTINGS)
    for step in steps:
        judge(whole, *step)
    resumed = SpikeRule(SETTINGS, tuple(whole.losses), tuple(whole.grad_norms))
    found = judge(resumed, *spike)
    assert found is not None and found == judge(whole, *spike)


def test_nothing_is_a_spike_without_enough_steps_before() -> None:
    rule = SpikeRule(SETTINGS)
    assert [judge(rule, loss, 1.0) for loss in [1.0, 1e9] * 8] == [None] * 16


def test_a_loss_that_moved_for_good_is_accepted_in_the_end() -> None:
    rule = SpikeRule(SETTINGS)
    for loss in np.linspace(2, 2.1, 32):
        judge(rule, float(loss), 1.0)
    skipped = [judge(rule, 5.0, 1.0) is not None for _ in range(10)]
    assert skipped[0] and not skipped[-1]


def test_none_turns_the_rule_off() -> None:
    rule = SpikeRule(SkipSettings(deviations=None))
    assert not any(judge(rule, loss, 1.0) for loss in [1.0, 1.1] * 100 + [1e9])


@pytest.mark.parametrize("loss", [2.0, 3.0])
def test_a_window_of_one_value_has_no_deviation_to_exceed(loss: float) -> None:
    rule = SpikeRule(SETTINGS)
    for _ in range(32):
        judge(rule, 2.0, 1.0)
    assert (judge(rule, loss, 1.0) is None) is (loss == 2.0)
