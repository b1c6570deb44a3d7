"""A divergence destroys no good checkpoint, and the advice in its error message works."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import die, skip, stop_after

from gecko.io.checkpoints import list_checkpoints, verify_files
from gecko.train import CheckpointSettings, NonFiniteError, Run, TrainResult, train, trainer
from gecko.train.checkpoints.checkpointer import Checkpointer
from gecko.train.checkpoints.content import lowest_loss
from gecko.train.step import SpikeRule


def with_rate(run: Run, rate: float) -> Run:
    return replace(run, optimizer=replace(run.optimizer, learning_rate=rate))


def checkpoints(run: Run) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in list_checkpoints(run.folder / "checkpoints"))


@pytest.mark.parametrize("every, keep", [(5, 2), (1, 1), (7, 1), (4, 1)])
def test_after_a_divergence_the_advice_works(small_run: Run, every: int, keep: int) -> None:
    """A save at every step, or at step 21, the first bad step, also saves the bad weights."""
    run = replace(small_run, steps=20, checkpoint=CheckpointSettings(every=every, keep=keep))
    train(run)
    longer = replace(run, steps=40)
    with pytest.raises(NonFiniteError, match=r"continue with --resume, which goes on from step-00000020") as caught:
        train(with_rate(longer, 1e10), resume=True)
    assert checkpoints(run)[-1] == 20
    kept = list((run.folder / "checkpoints").glob("diverged-*"))
    assert [path.name for path in kept] == (["diverged-00000021"] if every in (1, 7) else [])
    for path in kept:
        verify_files(path)
        assert str(path) in str(caught.value)
    result = train(with_rate(longer, 1e-4), resume=True)
    assert result.finished and result.evaluation is not None and result.evaluation.loss < 7
    assert not list((run.folder / "checkpoints").glob("diverged-*"))
    assert len(checkpoints(run)) == keep


@pytest.mark.parametrize("skipped", [{4}, {3, 4, 5}, {7, 8, 9}, {12}, {11, 12}, {4, 8, 12}, {1, 2}])
def test_nothing_is_saved_or_dropped_in_a_streak(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, skipped: set[int]
) -> None:
    """Except at the end, where a save drops no checkpoint. A save that was due happens at the next step taken."""
    saved: list[int] = []
    dropped: list[int] = []
    save, drop = Checkpointer.save, Checkpointer.drop_older

    def saving(self: Checkpointer, model: Any, optimizer: Any, position: Any) -> None:
        saved.append(position.step)
        save(self, model, optimizer, position)

    def dropping(self: Checkpointer, step: int) -> None:
        dropped.append(step)
        drop(self, step)

    monkeypatch.setattr(Checkpointer, "save", saving)
    monkeypatch.setattr(Checkpointer, "drop_older", dropping)
    skip(skipped, monkeypatch)
    assert train(small_run).finished

    def after(step: int) -> int:
        return next(taken for taken in range(step, 13) if taken not in skipped or taken == 12)

    assert saved == sorted({after(step) for step in (4, 8, 12)})
    ends_well = 12 not in skipped
    proven = [step for step in saved if any(taken not in skipped for taken in range(step + 1, 13))]
    assert dropped == proven + [12] * ends_well


def test_stopped_in_a_streak_it_saves_and_drops_nothing(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps since the checkpoint before are not lost, and the next session continues the streak."""
    run = replace(small_run, max_skips=3, checkpoint=CheckpointSettings(every=4, keep=1))
    skip({6, 7, 8, 9, 10}, monkeypatch)
    stop_after(7, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert train(run).step == 7
    assert checkpoints(run) == [4, 7]
    with pytest.raises(NonFiniteError, match=r"steps 6 to 8 .* goes on from step-00000004"):
        train(run, resume=True)
    assert checkpoints(run) == [4]
    assert _finishes(run, monkeypatch).finished


def _finishes(run: Run, monkeypatch: pytest.MonkeyPatch) -> TrainResult:
    monkeypatch.undo()
    return train(run, resume=True)


def test_before_the_first_checkpoint_it_begins_again(small_run: Run) -> None:
    with pytest.raises(NonFiniteError, match="--resume, which starts at the beginning: there is no checkpoint yet"):
        train(with_rate(replace(small_run, max_skips=2, checkpoint=CheckpointSettings(every=100)), 1e10))
    assert train(small_run, resume=True).finished


def test_the_only_checkpoint_is_not_set_aside(small_run: Run) -> None:
    run = replace(small_run, max_skips=2, checkpoint=CheckpointSettings(every=1))
    with pytest.raises(NonFiniteError, match=r"another folder with output=: step-00000001 has the weights"):
        train(with_rate(run, 1e10))
    assert checkpoints(run) == [1]


def test_killed_in_a_streak_the_checkpoint_before_it_is_there(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(small_run, steps=20, checkpoint=CheckpointSettings(every=2, keep=1))
    skip(set(range(7, 15)), monkeypatch)
    stop_after(14, monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    assert checkpoints(run) == [4, 6]


def test_a_damaged_checkpoint_is_not_what_it_goes_on_from(small_run: Run) -> None:
    run = replace(small_run, steps=8, checkpoint=CheckpointSettings(every=4, keep=3))
    train(run)
    weights: Path = run.folder / "checkpoints" / "step-00000008" / "model.safetensors"
    diverging = with_rate(replace(run, steps=30, checkpoint=CheckpointSettings(every=1, keep=3)), 1e10)
    content = weights.read_bytes()
    with pytest.raises(NonFiniteError, match="goes on from step-00000008"):
        train(diverging, resume=True)
    weights.write_bytes(content[:-1])
    with (
        pytest.warns(UserWarning, match="skipping the checkpoint step-00000008"),
        pytest.raises(NonFiniteError, match="goes on from step-00000004"),
    ):
        train(diverging, resume=True)


def test_a_finite_divergence_leaves_the_best_checkpoint(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is skipped: under the spike rule the higher loss becomes the normal one."""
    run = replace(small_run, steps=8, checkpoint=CheckpointSettings(every=2, keep=1))
    train(run)
    judge, record = SpikeRule.judge, SpikeRule.record
    monkeypatch.setattr(SpikeRule, "judge", lambda self, loss, norm: judge(self, loss + 4, norm))
    monkeypatch.setattr(SpikeRule, "record", lambda self, done: record(self, replace(done, loss=done.loss + 4)))
    assert train(replace(run, steps=16), resume=True).finished
    assert checkpoints(run) == [8, 16]


def test_weights_without_a_finite_held_out_loss_displace_no_checkpoint(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda *given: replace(evaluate(*given), loss=float("nan")))
    run = replace(small_run, checkpoint=CheckpointSettings(every=4, keep=1))
    assert train(run).finished
    assert checkpoints(run) == [8, 12]


def test_a_checkpoint_without_losses_is_never_the_best(small_run: Run) -> None:
    run = replace(small_run, checkpoint=CheckpointSettings(every=4, keep=3))
    train(run)
    newest, middle, oldest = list_checkpoints(run.folder / "checkpoints")
    (newest / "trainer.json").write_bytes(b"\xff")
    (middle / "trainer.json").write_text('{"step": 8}')
    assert lowest_loss([newest, middle, oldest]) == oldest
    assert lowest_loss([newest, middle]) == newest
