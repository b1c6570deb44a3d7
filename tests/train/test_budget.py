"""``minutes`` is converted to a number of steps, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.whole_runs import die, everything, same_end, stop_after

from gecko.train import CheckpointSettings, EvaluationSettings, Run, report, session, setup, train, trainer
from gecko.train.checkpoints.checkpointer import Checkpointer
from gecko.train.evaluate import HeldOut
from gecko.train.setup import Budget, Costs, most_steps
from gecko.train.trainer import Trainer


def test_a_time_budget_becomes_a_number_of_steps_once(run_in: Callable[[str], Run]) -> None:
    timed = train(replace(run_in("timed"), steps=None, minutes=0.01))
    assert timed.run.steps == timed.step >= 1
    assert f"steps={timed.step}" in timed.run.command()
    counted = train(replace(run_in("counted"), steps=timed.step))
    assert same_end(timed, counted)
    again = train(replace(run_in("timed"), steps=None, minutes=0.01), resume=True)
    assert again.run.steps == timed.step


def test_other_minutes_than_those_that_became_steps_are_refused(run_in: Callable[[str], Run]) -> None:
    """They would change only the recipe; ``steps`` changes the run."""
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
    stop_after(1, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.undo()
    found = Run.load(run.folder / "recipe.json").steps
    monkeypatch.setattr("gecko.train.session.steps_in_budget", lambda *_: pytest.fail("it was measured again"))
    assert train(run, resume=True).step == found


def test_what_does_not_fit_is_estimated_from_one_row_and_told(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps may take minutes: if one step is already too long, none is measured."""
    rows: list[int] = []
    step = setup.train_step

    def recorded(model: Any, optimizer: Any, parts: Any, **more: Any) -> Any:
        rows.append(sum(len(part.tokens) for part in parts))
        return step(model, optimizer, parts, **more)

    monkeypatch.setattr(setup, "train_step", recorded)
    assert train(replace(run_in("short"), steps=None, minutes=0.001)).step == 1
    assert rows == [1, 1]
    assert "minutes=0.001 is too short for this run: a single step" in capsys.readouterr().out


def test_a_run_whose_first_step_ends_long_after_the_budget_is_refused(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder can be trained in afterwards."""
    run = replace(run_in("long"), steps=None, minutes=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(setup, "SLACK_SECONDS", 0.0)
        patch.setattr(setup, "REPORT_SECONDS", 100.0)
        with pytest.raises(ValueError, match=r"takes about 1\.\d minutes. Nothing was trained. Try minutes=4"):
            train(run)
    assert train(replace(run, minutes=0.02)).step >= 1


def test_the_budget_counts_what_a_run_does(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts steps, held-out evaluations and checkpoints, at any intervals, and what follows them."""
    for every, save in ((5, 4), (1, 12), (7, 100), (12, 3)):
        run = replace(
            small_run, output=f"{small_run.output}-{every}",
            evaluation=replace(small_run.evaluation, every=every), checkpoint=CheckpointSettings(every=save),
        )  # fmt: skip
        done: list[str] = []
        places = ((Trainer, "_step"), (Trainer, "_evaluate"), (Checkpointer, "save"), (session, "finish_run"))
        with monkeypatch.context() as patched:
            for kind, name in places:
                count(kind, name, done, patched)
            train(run)
        parts = {
            "_step": Costs(1, 0, 0, 0), "_evaluate": Costs(0, 1, 0, 0), "save": Costs(0, 0, 1, 0),
            "finish_run": Costs(0, 0, 0, 1),
        }  # fmt: skip
        assert {name: part.seconds(run, 12) for name, part in parts.items()} == Counter(done)


@pytest.mark.parametrize("left", [3.0, 60.0, 61.5, 1000.0])
def test_as_many_steps_are_taken_as_fit(small_run: Run, left: float) -> None:
    costs = Costs(step=0.7, evaluation=3.0, checkpoint=0.5, end=20.0)
    steps = most_steps(small_run, costs, left)
    assert steps == 1 or costs.seconds(small_run, steps) <= left
    assert costs.seconds(small_run, steps + 1) > left


def test_a_part_is_estimated_from_a_piece_of_it(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation takes one batch's time for each of its batches, and a sample one token's for each of its tokens."""
    found: list[Costs] = []
    monkeypatch.setattr(setup, "_timed", lambda work: (work(), 3.0)[1])
    monkeypatch.setattr(setup, "most_steps", lambda run, costs, left: (found.append(costs), 1)[1])
    batches: list[int] = []
    evaluate = trainer.evaluate

    def counting(model: Any, held_out: HeldOut, *others: Any) -> Any:
        batches.append(-(-len(held_out.rows.tokens) // held_out.batch_size))
        return evaluate(model, held_out, *others)

    for place in (trainer, report):
        monkeypatch.setattr(place, "evaluate", counting)
    run = replace(small_run, evaluation=EvaluationSettings(every=5, rows=6, final_rows=10))
    train(replace(run, steps=None, minutes=10, sample=replace(run.sample, tokens=20)))
    (costs,), (curve, *_, final) = found, batches
    assert curve > 1 and final > curve
    assert costs.step == 3
    assert costs.evaluation == 3 * curve
    assert costs.end == 3 * final + 3 * 20 / setup._SAMPLED + setup.REPORT_SECONDS


def test_the_budget_begins_with_the_command(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, left = session.steps_in_budget, []

    def late(*arguments: Any) -> Budget:
        *others, begin = arguments
        budget = measure(*others, begin - 595)
        left.append(budget.left)
        return replace(budget, steps=1)

    monkeypatch.setattr(session, "steps_in_budget", late)
    train(replace(small_run, steps=None, minutes=10))
    assert left[0] < 5


def count(kind: object, name: str, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(kind, name)

    def counting(*arguments: Any) -> Any:
        done.append(name)
        return original(*arguments)

    monkeypatch.setattr(kind, name, counting)
