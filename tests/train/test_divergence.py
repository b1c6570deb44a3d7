"""Divergence, spikes and non-finite values."""

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.whole_runs import curve, same_end, saved_steps, skip, stop_after
from torch import Tensor, nn

from gecko.io.checkpoints import list_checkpoints, verify_files
from gecko.train import CheckpointSettings, NonFiniteError, Run, SkipSettings, TrainResult, train, trainer
from gecko.train.checkpoints import Checkpointer, lowest_loss
from gecko.train.health import find_nonfinite
from gecko.train.step import SpikeRule, StepResult, Verdict
from gecko.train.trainer import Trainer

NAN, INFINITE = float("nan"), float("inf")

# ---- A divergence destroys no good checkpoint, and the advice in its error message works.


def with_rate(run: Run, rate: float) -> Run:
    return replace(run, optimizer=replace(run.optimizer, learning_rate=rate))


@pytest.mark.parametrize("every, keep", [(5, 2), (1, 1), (7, 1)])
def test_after_a_divergence_the_advice_works(small_run: Run, every: int, keep: int) -> None:
    """A save at every step, or at step 21, the first bad step, also saves the bad weights."""
    run = replace(small_run, steps=20, checkpoint=CheckpointSettings(every=every, keep=keep))
    train(run)
    longer = replace(run, steps=34, max_skips=4)
    with pytest.raises(NonFiniteError, match=r"continue with --resume, which goes on from step-00000020") as caught:
        train(with_rate(longer, 1e10), resume=True)
    assert saved_steps(run)[-1] == 20
    kept = list((run.folder / "checkpoints").glob("diverged-*"))
    assert [path.name for path in kept] == (["diverged-00000021"] if every in (1, 7) else [])
    for path in kept:
        verify_files(path)
        assert str(path) in str(caught.value)
    result = train(with_rate(longer, 1e-4), resume=True)
    assert result.finished and result.evaluation is not None and result.evaluation.loss < 7
    assert not list((run.folder / "checkpoints").glob("diverged-*"))
    assert len(saved_steps(run)) == keep


@pytest.mark.parametrize("skipped", [{3, 4, 5}, {7, 8, 9}, {11, 12}, {4, 8, 12}, {1, 2}])
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
    assert saved_steps(run) == [4, 7]
    with pytest.raises(NonFiniteError, match=r"steps 6 to 8 .* goes on from step-00000004"):
        train(run, resume=True)
    assert saved_steps(run) == [4]
    monkeypatch.undo()
    assert train(run, resume=True).finished


def test_without_a_good_checkpoint_it_begins_again(run_in: Callable[[str], Run]) -> None:
    """In the same folder before the first checkpoint; the only one is not set aside."""
    for every, said in ((100, "--resume, which starts at the beginning: there is no checkpoint yet"),
                        (1, r"another folder with output=: step-00000001 has the weights")):  # fmt: skip
        run = replace(run_in(f"{every}"), max_skips=2, checkpoint=CheckpointSettings(every=every))
        with pytest.raises(NonFiniteError, match=said):
            train(with_rate(run, 1e10))
        assert saved_steps(run) == ([1] if every == 1 else [])
    assert train(run_in("100"), resume=True).finished


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
    assert saved_steps(run) == [8, 16]


def test_weights_without_a_finite_held_out_loss_displace_no_checkpoint(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda *given: replace(evaluate(*given), loss=float("nan")))
    run = replace(small_run, checkpoint=CheckpointSettings(every=4, keep=1))
    assert train(run).finished
    assert saved_steps(run) == [8, 12]


@pytest.mark.parametrize("value", [NAN, INFINITE])
@pytest.mark.parametrize("spoilt", ["weights", "optimizer"])
@pytest.mark.parametrize("step, keep", [(3, 1), (5, 1), (6, 2), (12, 2)])
def test_what_is_not_finite_is_never_saved(
    small_run: Run, whole: TrainResult, monkeypatch: pytest.MonkeyPatch, step: int, keep: int, spoilt: str, value: float
) -> None:
    """Even if the losses are: no text has the token. The run then goes on from a good checkpoint."""
    run = replace(small_run, checkpoint=CheckpointSettings(every=4, keep=keep))
    save = Checkpointer.save

    def saving(self: Checkpointer, model: Any, optimizer: Any, position: Any) -> None:
        assert step > position.step
        save(self, model, optimizer, position)

    original = Trainer._step

    def stepping(self: Trainer) -> None:
        if self.next_step == step:
            weight: Any = self.model.embedding.weight  # type: ignore[union-attr]
            rows = weight if spoilt == "weights" else self.optimizer.state[weight]["exp_avg"]
            rows.data[255] = value
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", saving)
        patch.setattr(Trainer, "_step", stepping)
        with pytest.raises(NonFiniteError, match=r"after step \d+ embedding\.weight.* is not finite.*with --resume"):
            train(run)
    assert saved_steps(run) == list(range(4, step, 4))[-keep - 1 :]
    assert same_end(train(run, resume=True), whole)


def test_a_checkpoint_without_losses_is_never_the_best(small_run: Run) -> None:
    run = replace(small_run, checkpoint=CheckpointSettings(every=4, keep=3))
    train(run)
    newest, middle, oldest = list_checkpoints(run.folder / "checkpoints")
    (newest / "trainer.json").write_bytes(b"\xff")
    (middle / "trainer.json").write_text('{"step": 8}')
    assert lowest_loss([newest, middle, oldest]) == oldest
    assert lowest_loss([newest, middle]) == newest


# ---- The spike rule is a pure function of the steps before, so an interruption does not change it.

SETTINGS = SkipSettings(deviations=6.0, window=32)
steady = st.lists(st.tuples(st.floats(2.0, 3.0), st.floats(0.5, 1.5)), min_size=16, max_size=80)


def judge(rule: SpikeRule, loss: float, norm: float) -> str | None:
    """Return why a step is a spike, or None if it is not. The host releases the rule at once."""
    verdict = rule.judge(*torch.tensor([loss, norm], dtype=torch.float64))
    rule.release()
    return rule.record(StepResult(loss, norm, Verdict(int(verdict))))


def fed(steps: list[tuple[float, float]]) -> SpikeRule:
    """Return a rule that has judged ``steps``."""
    rule = SpikeRule(SETTINGS)
    for step in steps:
        judge(rule, *step)
    return rule


@given(steady)
def test_steps_like_those_before_are_taken(steps: list[tuple[float, float]]) -> None:
    """None of 32 values in an interval is more than √31 standard deviations from their mean."""
    rule = SpikeRule(SkipSettings(deviations=math.sqrt(80), window=80), [2.0, 3.0], [0.5, 1.5])
    steps = [*steps[:2], *steps]
    assert [judge(rule, *step) for step in steps] == [None] * len(steps)


@given(steady, st.sampled_from(["loss", "gradient norm"]))
def test_what_stands_out_by_either_number_is_a_spike(steps: list[tuple[float, float]], which: str) -> None:
    rule = fed(steps)
    assert judge(rule, -1000.0, 0.0) is None  # low is never a spike
    rule = fed(steps)
    found = judge(rule, 100.0, 1.0) if which == "loss" else judge(rule, 2.5, 100.0)
    assert found is not None and found.startswith(f"the {which} 100 is more than 6 standard deviations")


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=100), st.integers(0, 100))
def test_a_rule_goes_on_from_what_it_remembered(steps: list[tuple[float, float]], cut: int) -> None:
    whole, first = SpikeRule(SETTINGS), SpikeRule(SETTINGS)
    steps = [*steps, (1e6, 1.0), (5.0, 1e6)]
    expected = [judge(whole, *step) for step in steps]
    got = [judge(first, *step) for step in steps[:cut]]
    second = SpikeRule(SETTINGS, tuple(first.losses), tuple(first.grad_norms))
    assert [*got, *(judge(second, *step) for step in steps[cut:])] == expected


def test_when_a_high_loss_is_no_spike() -> None:
    """Without enough steps before, after the loss moved for good, and if the rule is turned off."""
    rule = SpikeRule(SETTINGS)
    assert [judge(rule, loss, 1.0) for loss in [1.0, 1e9] * 8] == [None] * 16
    rule = fed([(float(loss), 1.0) for loss in np.linspace(2, 2.1, 32)])
    skipped = [judge(rule, 5.0, 1.0) is not None for _ in range(10)]
    assert skipped[0] and not skipped[-1]
    rule = SpikeRule(SkipSettings(deviations=None))
    assert not any(judge(rule, loss, 1.0) for loss in [1.0, 1.1] * 100 + [1e9])


def test_a_window_of_one_value_has_no_deviation_to_exceed() -> None:
    assert judge(fed([(2.0, 1.0)] * 32), 2.0, 1.0) is None
    assert judge(fed([(2.0, 1.0)] * 32), 3.0, 1.0) is not None


# ---- The origin of a non-finite value is found, and its step is skipped.


class Bad(nn.Module):
    """Identity that adds a number, in the forward or in the backward pass."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.forward_extra, self.backward_extra = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight + self.forward_extra
        y.register_hook(lambda grad: grad + self.backward_extra)
        return y


def chain(**positions: Bad) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the modules Linear, a, Linear, b, Linear, and a function that computes loss and gradients."""
    torch.manual_seed(0)
    names: dict[str, nn.Module] = {"first": nn.Linear(4, 4), "a": Bad(), "middle": nn.Linear(4, 4), "b": Bad()}
    model = nn.Sequential()
    for name, module in {**names, **positions, "last": nn.Linear(4, 4)}.items():
        model.add_module(name, module)

    def compute() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).square().mean()
        torch.autograd.backward(loss)
        return loss.detach()

    return model, compute


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        *[({name: {"forward": value}}, f"the output of {name} (Bad)") for name in "ab" for value in (NAN, -INFINITE)],
        ({"a": {"forward": INFINITE}, "b": {"forward": NAN}}, "the output of a (Bad)"),
        ({"b": {"backward": NAN}}, "the gradient of b.weight"),
    ],
    ids=str,
)
def test_the_first_value_is_named_and_nothing_stays_behind(bad: dict[str, dict[str, float]], named: str) -> None:
    """Outputs in the order of the forward pass, then gradients in that of the backward pass."""
    model, compute = chain(**{name: Bad(**numbers) for name, numbers in bad.items()})
    assert find_nonfinite(model, compute) == f"{named} is not finite"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_parameter_is_named_before_what_it_spoils_and_a_loss_alone() -> None:
    model, compute = chain()
    assert "loss" in find_nonfinite(model, lambda: compute() * NAN)
    with torch.no_grad():
        model.get_parameter("middle.bias")[0] = NAN
    assert find_nonfinite(model, compute) == "the parameter middle.bias is not finite"


def test_only_skips_in_a_row_count(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips before a checkpoint count too: the first session is stopped in step 4, which is skipped."""
    skip({1, 2, 4, 5, 6}, monkeypatch, "the cause")
    run = replace(small_run, max_skips=3)
    stop_after(4, monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert train(run).step == 4
    with pytest.raises(NonFiniteError, match=r"steps 4 to 6 .*max_skips=3.*the cause"):
        train(run, resume=True)


def poison(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one module return NaN in the given steps."""
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        module = self.model.blocks[1].feed_forward.fc2  # type: ignore[union-attr]
        hook = module.register_forward_hook(lambda m, i, out: out * float("nan"))
        if self.next_step not in steps:
            hook.remove()
        original(self)
        hook.remove()

    monkeypatch.setattr(Trainer, "_step", stepping)


def test_a_non_finite_step_is_named_and_skipped(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many in a row end the run and keep the checkpoint."""
    poison({2, 3, *range(6, 100)}, monkeypatch)
    with pytest.raises(NonFiniteError, match=r"steps 6 to 8 .*blocks\.1\.feed_forward\.fc2.*--resume"):
        train(replace(small_run, max_skips=3))
    skipped = {record["step"]: record for record in curve(small_run) if "skipped" in record}
    assert list(skipped) == [2, 3, 6, 7, 8]
    assert skipped[2]["loss"] is None
    assert "blocks.1.feed_forward.fc2" in skipped[2]["skipped"]
    assert saved_steps(small_run) == [4]
    weights = load_file(small_run.folder / "checkpoints" / "step-00000004" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
