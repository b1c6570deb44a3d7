"""Minutes become a number of steps, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from whole_runs import die, everything, same_end, stop_after

from gecko.train import Run, train


def test_a_time_budget_becomes_a_number_of_steps_once(run_in: Callable[[str], Run]) -> None:
    timed = train(replace(run_in("timed"), steps=None, minutes=0.01))
    assert timed.run.steps == timed.step >= 1
    assert f"steps={timed.step}" in timed.run.command()
    counted = train(replace(run_in("counted"), steps=timed.step))
    assert same_end(timed, counted)
    again = train(replace(run_in("timed"), steps=None, minutes=0.01), resume=True)
    assert again.run.steps == timed.step


def test_other_minutes_than_those_that_became_steps_are_refused(run_in: Callable[[str], Run]) -> None:
    """They would change nothing but the recipe; steps do."""
    run = replace(run_in("timed"), steps=None, minutes=0.01)
    done = train(run).step
    before = everything(run.folder)
    with pytest.raises(ValueError, match=rf"fixed at {done}; got minutes=0\.02\. Set steps="):
        train(replace(run, minutes=0.02), resume=True)
    assert everything(run.folder) == before
    assert train(replace(run, minutes=0.02, steps=done + 1), resume=True).step == done + 1


def test_killed_before_its_first_checkpoint_a_run_keeps_its_measured_steps(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(run_in("killed"), steps=None, minutes=0.02)
    stop_after(2, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    found = Run.load(run.folder / "recipe.json").steps
    monkeypatch.setattr("gecko.train.session.steps_in_budget", lambda *_: pytest.fail("it was measured again"))
    assert train(run, resume=True).step == found
