"""``minutes`` become a number of steps: once for a cosine, else when the time for the decay and the end has come.

Clocks of these tests are made up: each look at one takes as many seconds as the machine is slow at that time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.corpora import BYTE_MODEL
from support.whole_runs import curve, everything, killed, plain_report, same_end
from train.conftest import small

from gecko.train import (
    CheckpointSettings,
    EvaluationSettings,
    Run,
    ScheduleSettings,
    TrainResult,
    budget,
    finish,
    session,
    train,
    trainer,
)
from gecko.train.budget import Costs, most_steps
from gecko.train.checkpoints import Checkpointer
from gecko.train.evaluate import HeldOut
from gecko.train.state import read_trainer_state
from gecko.train.step import Step
from gecko.train.trainer import Trainer

ONE_LAYER = replace(BYTE_MODEL, num_layers=1)


class Ticks:
    """Clock that a look takes ``slowness(seconds so far)`` seconds forward."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.seconds, self._slowness = 0.0, slowness

    def __call__(self) -> float:
        self.seconds += self._slowness(self.seconds)
        return self.seconds


MACHINES = {
    "steady": lambda seconds: 0.7,
    "slow": lambda seconds: 1.5,
    "first slow": lambda seconds: 2.0 if seconds < 80 else 0.7,
    "later slow": lambda seconds: 0.7 if seconds < 100 else 1.2,
    "stalls": lambda seconds: 20.0 if 60 < seconds < 70 else 0.7,
}


def quick() -> Ticks:
    return Ticks(lambda _: 0.2)


def timed(run: Run) -> Run:
    """Return the run with three minutes in place of its steps, and constant costs besides steps."""
    schedule = ScheduleSettings(warmup=0.1, final=0.1)
    evaluation, checkpoint = replace(run.evaluation, every=1000), replace(run.checkpoint, every=10)
    return replace(run, steps=None, minutes=3, schedule=schedule, evaluation=evaluation, checkpoint=checkpoint)


@pytest.fixture
def small_run(small_run: Run) -> Run:
    """Return the small run with a model of one layer: clocks are made up, and many steps are taken."""
    return replace(small_run, model=ONE_LAYER)


@pytest.fixture(scope="module")
def steady(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, float]:
    """Return the timed run on a steady machine, and the seconds that it took; tests must not change its folder."""
    run = replace(small(corpus, tmp_path_factory.mktemp("steady") / "run"), model=ONE_LAYER)
    clock = Ticks(MACHINES["steady"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gecko.train.finish.write_report", plain_report)
        return train(timed(run), now=clock), clock.seconds


@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_that_follows_the_clock_uses_the_time_and_no_more(
    run_in: Callable[[str], Run], steady: tuple[TrainResult, float], machine: str
) -> None:
    clock = Ticks(MACHINES[machine])
    result, seconds = steady if machine == "steady" else (train(timed(run_in("timed")), now=clock), clock.seconds)
    assert result.finished and result.run.steps == result.step
    assert 150 <= seconds <= 180
    schedule = result.run.schedule
    assert schedule.decay_steps == pytest.approx(schedule.decay * result.step, abs=1)


@pytest.mark.parametrize(
    ("moment", "machine"),
    [("in the warm-up", "slow"), ("before", "first slow"), ("between", "slow")],
)
def test_a_run_that_follows_the_clock_resumes_exactly(
    run_in: Callable[[str], Run], steady: tuple[TrainResult, float], moment: str, machine: str
) -> None:
    """The result is that of a run whose steps are given. What was decided before a kill is kept after it, whatever the
    clock of the next machine says; what was not is decided by that clock and the time that was already used."""
    first, _ = steady
    decided = first.step - (first.run.schedule.decay_steps or 0)
    steps = {"in the warm-up": 6, "before": decided - 6, "between": decided + 1}
    run = timed(run_in("killed"))
    killed(steps[moment], run, now=Ticks(MACHINES["steady"]))
    clock = Ticks(MACHINES[machine])
    resumed = train(run, resume=True, now=clock)
    if moment == "between":
        assert resumed.run.steps == first.run.steps
        assert same_end(resumed, first) and curve(run) == curve(first.run)
    given = train(replace(resumed.run, output=str(run_in("given").folder)))
    assert given.step == resumed.step
    assert same_end(resumed, given) and curve(run) == curve(given.run)


def test_before_the_decay_no_rate_depends_on_the_number_of_steps(run_in: Callable[[str], Run]) -> None:
    rates = []
    for minutes in (2, 3):
        run = replace(timed(run_in(f"{minutes}")), minutes=minutes)
        run = replace(run, schedule=replace(run.schedule, warmup_steps=5))
        result = train(run, now=Ticks(MACHINES["steady"]))
        constant = result.step - (result.run.schedule.decay_steps or 0)
        rates.append([row["learning_rate"] for row in curve(run) if row["kind"] == "train"][: constant + 1])
    few, many = rates
    assert len(few) < len(many) and few == many[: len(few)]
    assert few == [0.01 * min(1, (step + 1) / 5) for step in range(len(few))]


def test_a_resumed_run_counts_the_time_of_its_earlier_sessions(
    run_in: Callable[[str], Run], steady: tuple[TrainResult, float]
) -> None:
    run = timed(run_in("stopped"))
    for step in (9, 15):
        clock = Ticks(MACHINES["steady"])
        killed(step, run, resume=True, now=clock)
    used = read_trainer_state(run.folder / "checkpoints" / "step-00000010").elapsed
    clock = Ticks(MACHINES["steady"])
    assert train(run, resume=True, now=clock).step < steady[0].step
    assert clock.seconds + used < 180


def test_another_schedule_does_not_follow_a_clock_that_was_begun(run_in: Callable[[str], Run]) -> None:
    run = timed(run_in("stopped"))
    killed(12, run, now=Ticks(MACHINES["steady"]))
    cosine = replace(run, schedule=replace(run.schedule, kind="cosine"), overrides=("schedule.kind=cosine",))
    with pytest.raises(ValueError, match=r"schedule\.kind must be wsd .* got cosine\. Set steps="):
        train(cosine, resume=True)
    longer = train(replace(run, minutes=4), resume=True, now=Ticks(MACHINES["steady"]))
    assert longer.finished and longer.run.minutes == 4


def test_long_evaluations_get_fewer_rows(run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """The final one takes at most a tenth of the time, and so do the others together; a resumed run has the same."""
    monkeypatch.setattr(budget, "_timed", lambda work, clock: (work(), 4.0)[1])
    run = timed(run_in("bounded"))
    run = replace(
        run, minutes=2, sample=replace(run.sample, tokens=800),
        evaluation=EvaluationSettings(every=5, rows=40, final_rows=1000),
    )  # fmt: skip
    killed(5, run, now=Ticks(MACHINES["steady"]))
    result = train(run, resume=True, now=Ticks(MACHINES["steady"]))
    assert result.run.evaluation == EvaluationSettings(every=5, rows=2, final_rows=6)
    assert result.run.sample.tokens == 24
    assert {len(row["row_losses"]) for row in curve(run) if row["kind"] == "validation"} == {2}
    assert result.evaluation is not None and len(result.evaluation.row_losses) == 6


def cosine(run: Run) -> Run:
    return replace(run, schedule=ScheduleSettings(kind="cosine"))


def test_a_time_budget_becomes_a_number_of_steps_once(run_in: Callable[[str], Run]) -> None:
    """Other minutes would change only the recipe, and are refused; ``steps`` changes the run."""
    run = replace(cosine(run_in("timed")), steps=None, minutes=0.2)
    measured = train(run, now=quick())
    done = measured.step
    assert measured.run.steps == done >= 1 and f"steps={done}" in measured.run.command()
    counted = train(replace(cosine(run_in("counted")), steps=done))
    assert same_end(measured, counted)
    assert train(run, resume=True).run.steps == done
    before = everything(run.folder)
    with pytest.raises(ValueError, match=rf"fixed at {done}; got minutes=0\.3\. Set steps="):
        train(replace(run, minutes=0.3), resume=True)
    assert everything(run.folder) == before
    assert train(replace(run, minutes=0.3, steps=done + 1), resume=True).step == done + 1


def test_killed_before_its_first_checkpoint_a_run_keeps_its_measured_steps(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(cosine(run_in("killed")), steps=None, minutes=0.2)
    killed(1, run, now=quick())
    found = Run.load(run.folder / "recipe.json").steps
    monkeypatch.setattr("gecko.train.session.measured", lambda *_, **__: pytest.fail("it was measured again"))
    assert train(run, resume=True).step == found


def test_what_does_not_fit_is_estimated_from_one_row_and_told(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps may take minutes: if one step is already too long, none is measured."""
    rows: list[int] = []

    class Recorded(Step):
        def start(self, parts: Any, learning_rate: float) -> Any:
            rows.append(sum(len(part.tokens) for part in parts))
            return super().start(parts, learning_rate)

    monkeypatch.setattr(budget, "Step", Recorded)
    assert train(replace(run_in("short"), steps=None, minutes=0.001), now=quick()).step == 1
    assert rows == [1, 1]
    assert "minutes=0.001 is too short for this run: a single step" in capsys.readouterr().out


def test_a_run_whose_first_step_ends_long_after_the_budget_is_refused(
    run_in: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder can be trained in afterwards."""
    run = replace(run_in("long"), steps=None, minutes=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(budget, "SLACK_SECONDS", 0.0)
        patch.setattr(budget, "REPORT_SECONDS", 100.0)
        with pytest.raises(ValueError, match=r"about 1\.\d minutes, after 0\.\d in which .* Try minutes=4"):
            train(run, now=quick())
    assert train(run, now=quick()).step >= 1


def test_the_budget_counts_what_a_run_does(small_run: Run) -> None:
    """It counts steps, held-out evaluations and checkpoints, at any intervals, and what follows them."""
    for every, save in ((5, 4), (7, 100), (12, 3)):
        run = replace(
            small_run, output=f"{small_run.output}-{every}",
            evaluation=replace(small_run.evaluation, every=every), checkpoint=CheckpointSettings(every=save),
        )  # fmt: skip
        places = ((Trainer, "_step"), (Trainer, "_evaluate"), (Checkpointer, "save"), (session, "finish_run"))
        with ExitStack() as stack:
            spies = [
                stack.enter_context(mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name)))
                for kind, name in places
            ]
            train(run)
        units = (Costs(*row) for row in np.eye(4).tolist())
        assert [unit.seconds(run, 12) for unit in units] == [spy.call_count for spy in spies]


def test_as_many_steps_are_taken_as_fit(small_run: Run) -> None:
    costs = Costs(step=0.7, evaluation=3.0, checkpoint=0.5, end=20.0)
    for left in (3.0, 60.0, 61.5, 1000.0):
        steps = most_steps(small_run, costs, left)
        assert steps == 1 or costs.seconds(small_run, steps) <= left
        assert costs.seconds(small_run, steps + 1) > left


def test_a_part_is_estimated_from_a_piece_of_it(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation takes one batch's time for each of its batches, and a sample one token's for each of its tokens."""
    found: list[Costs] = []
    monkeypatch.setattr(budget, "EVALUATING_PART", 1000)
    monkeypatch.setattr(budget, "_timed", lambda work, clock: (work(), 3.0)[1])
    monkeypatch.setattr(budget, "most_steps", lambda run, costs, left: (found.append(costs), 1)[1])
    batches: list[int] = []
    evaluate = trainer.evaluate

    def counting(model: Any, held_out: HeldOut, *others: Any) -> Any:
        batches.append(-(-len(held_out.rows.tokens) // held_out.batch_size))
        return evaluate(model, held_out, *others)

    for place in (trainer, finish):
        monkeypatch.setattr(place, "evaluate", counting)
    run = replace(small_run, evaluation=EvaluationSettings(every=5, rows=6, final_rows=10))
    train(replace(cosine(run), steps=None, minutes=1000, sample=replace(run.sample, tokens=20)))
    (costs,), (curve, *_, final) = found, batches
    assert curve > 1 and final > curve
    assert costs.step == 3
    assert costs.evaluation == 3 * curve
    assert costs.end == 3 * final + 3 * 20 / budget._SAMPLED + budget.REPORT_SECONDS


def test_the_budget_begins_with_the_command(run_in: Callable[[str], Run]) -> None:
    late, early = (train(timed(run_in(f"{begin}")), begin=begin, now=Ticks(lambda _: 1.0)).step for begin in (-90, 0))
    assert late < 0.8 * early
