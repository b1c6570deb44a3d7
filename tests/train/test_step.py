"""One optimizer step, its learning rate and the size of its batch."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import BYTE_MODEL, random_batch
from torch import Tensor
from train.conftest import growing

from gecko.data import Batch
from gecko.models.gecko import Gecko
from gecko.parallel.mesh import Ranks
from gecko.train import Run, ScheduleSettings
from gecko.train.data import batch_of_step, load_data
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import Step, compute_gradients, learning_rate_factor, split_batch

# ---- One optimizer step: gradient accumulation, clipping, precision.

CPU = torch.device("cpu")


def gradients(model: Gecko, batch: Batch, parts: int) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = compute_gradients(model, split_batch(batch, parts, CPU), "float32")
    return loss, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.sampled_from([2, 3, 6]), ignored=st.floats(0, 0.97))
def test_a_batch_in_parts_is_the_batch(seed: int, parts: int, ignored: float) -> None:
    """Also if the parts have very different numbers of targets."""
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL).double()
    batch = random_batch(seed, 6, 19, ignored)
    if not batch.scored_tokens:
        return
    loss, whole = gradients(model, batch, 1)
    loss_in_parts, in_parts = gradients(model, batch, parts)
    # The sum of the parts' losses is float32.
    torch.testing.assert_close(loss_in_parts, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=1e-8)


def test_a_batch_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one target"):
        split_batch(random_batch(0, 6, 19, 1.1), 2, CPU)


def step_of(model: Gecko, **changes: Any) -> Any:
    optimizer = build_optimizer(model, OptimizerSettings())
    step = Step(model, optimizer, **{"clip": 1.0, "precision": "float32", **changes})
    return step.start(split_batch(random_batch(1, 6, 19), 1, CPU), 1e-3).wait()


def test_gradients_are_clipped_to_the_norm() -> None:
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL)
    assert step_of(model, clip=0.01).grad_norm > 0.01
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert norms.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_bfloat16_keeps_parameters_gradients_and_loss_in_float32() -> None:
    torch.manual_seed(0)
    model = Gecko(BYTE_MODEL)
    seen = set()
    model.blocks[0].mixer.to_value.register_forward_hook(lambda m, i, out: seen.add(out.dtype))  # type: ignore
    exact = step_of(Gecko(BYTE_MODEL).requires_grad_(True))
    rounded = step_of(model, precision="bfloat16")
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)


# ---- Learning rate over a run: bounds, shape and end of both schedules. Growth of batches over the first steps.

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


def test_the_shapes_of_both_schedules() -> None:
    factors = curve(ScheduleSettings("wsd", warmup=0.1, decay=0.2, final=0.0), 100)
    assert factors[10:81] == [1.0] * 71 and factors[90] == pytest.approx(0.5)
    assert curve(ScheduleSettings("cosine", warmup=0.0, final=0.2), 100)[50] == pytest.approx(0.6)
    assert curve(ScheduleSettings("wsd", warmup=0.0, decay_steps=1000), 10)[0] == 1.0, "no decay begins before the run"


def test_a_step_outside_the_run_is_refused() -> None:
    for step in (-1, 10):
        with pytest.raises(ValueError, match=r"0\.\.9"):
            learning_rate_factor(ScheduleSettings(), step, 10)


@st.composite
def growing_runs(draw: st.DrawFn) -> tuple[ScheduleSettings, int, int]:
    """Return a schedule, the final batch size and the final sequence length."""
    first_rows, first_length = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    over = st.integers(0, 40)
    schedule = ScheduleSettings(
        initial_batch_size=first_rows, batch_size_steps=draw(over), initial_sequence_length=first_length,
        sequence_length_steps=draw(over),
    )  # fmt: skip
    return schedule, first_rows << draw(st.integers(0, 5)), first_length << draw(st.integers(0, 5))


@given(growing_runs())
def test_batches_double_until_they_are_full(given_run: tuple[ScheduleSettings, int, int]) -> None:
    schedule, rows, length = given_run
    before = [schedule.rows_before(rows, step) for step in range(60)]
    sizes = [after - earlier for earlier, after in itertools.pairwise(before)]
    lengths_of_rows = [schedule.length_at(length, step) for step in range(60)]
    assert before[0] == 0
    for values, first, last, over in (
        (sizes, schedule.initial_batch_size, rows, schedule.batch_size_steps),
        (lengths_of_rows, schedule.initial_sequence_length, length, schedule.sequence_length_steps),
    ):
        assert first is not None and values[0] == (first if over else last)
        assert all(value == last for value in values[over:])
        assert over == 0 or first == last or values[over - 1] < last
        assert all(later % earlier == 0 for earlier, later in itertools.pairwise(values))
    assert all(size == rows for size in sizes[schedule.first_full_step :])


def test_growing_batches_read_the_same_rows_once(small_run: Run) -> None:
    """The tokens of all steps are those of all rows, one after the other."""
    run = growing(small_run)
    rows = load_data(run, Ranks()).rows
    batches = [batch_of_step(run, rows, step, Ranks()) for step in range(8)]
    shapes = [tuple(batch.tokens.shape) for batch in batches]
    assert shapes == [(4, 6), (4, 6), (8, 6), (4, 12), (8, 12), (8, 12), (4, 24), (4, 24)]
    whole = rows(range(run.rows_before(8)))
    for name in ("tokens", "targets", "segment_ids"):
        read = torch.cat([getattr(batch, name).flatten() for batch in batches])
        assert torch.equal(read, getattr(whole, name).flatten())


def test_a_first_batch_that_does_not_double_to_the_last_is_refused(small_run: Run) -> None:
    for first, advice in ((3, "=2"), (5, "=4"), (16, "=8")):
        said = f"divided by a power of two.*got {first} and 8.*initial_batch_size{advice}"
        with pytest.raises(ValueError, match=said):
            replace(small_run, batch_size=8, schedule=ScheduleSettings(initial_batch_size=first))
