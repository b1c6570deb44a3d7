"""Carried state: rows of a lane are one long row, a resumed run is the uninterrupted one, skips empty it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.whole_runs import curve, killed

from gecko.data import Batch
from gecko.models import LlamaConfig
from gecko.models.gecko import Gecko
from gecko.parallel.mesh import Ranks
from gecko.train import DataSettings, Run, ScheduleSettings, train
from gecko.train.data import batch_of_step, load_data
from gecko.train.step import CarriedState, compute_gradients, split_batch

CPU = torch.device("cpu")


@pytest.fixture
def carrying(run_in: Callable[[str], Run]) -> Callable[..., Run]:
    def make(name: str, **changes: Any) -> Run:
        run = run_in(name)
        return replace(run, data=replace(run.data, carry_state=True), **changes)

    return make


def losses_of_steps(run: Run, model: Gecko, steps: int) -> list[float]:
    """Return the losses of the first steps without updates; each row follows the state of the one before."""
    data = load_data(run, Ranks())
    carried, found = CarriedState(run, model, Ranks()), []
    for step in range(steps):
        batch = batch_of_step(run, data.rows, step, Ranks())
        parts = split_batch(batch, run.gradient_accumulation_steps, CPU)
        found.append(float(compute_gradients(model, parts, "float32", carried=carried)))
        carried.advance()
    return found


@pytest.mark.parametrize("changes", [{"gradient_accumulation_steps": 2}, {"sequence_length": 17}])
def test_rows_of_a_lane_are_one_long_row(carrying: Callable[..., Run], changes: dict[str, Any]) -> None:
    """Also over document borders, and with rows that end inside a chunk."""
    run = carrying("run", **changes)
    torch.manual_seed(1)
    model = Gecko(run.model).double()
    rows = load_data(run, Ranks()).rows
    batches = [batch_of_step(run, rows, step, Ranks()) for step in range(24)]
    long = Batch(*(torch.cat([getattr(x, name) for x in batches], 1) for name in ("tokens", "targets", "segment_ids")))
    assert (long.segment_ids[:, 1:] != long.segment_ids[:, :-1]).any()
    losses, _ = model.token_losses(long.tokens, long.targets, long.segment_ids)
    expected = [
        float(part.sum() / batch.scored_tokens)
        for part, batch in zip(losses.split(run.sequence_length, 1), batches, strict=True)
    ]
    assert losses_of_steps(run, model, 24) == pytest.approx(expected, rel=1e-9)
    alone = compute_gradients(model, split_batch(batches[1], 1, CPU), "float32")
    assert abs(expected[1] - alone) > 1e-4  # the state changes the losses


def test_resumed_with_other_parts_has_the_same_losses(carrying: Callable[..., Run]) -> None:
    whole, run = train(carrying("whole")), carrying("killed")
    killed(7, run)
    resumed = train(replace(run, gradient_accumulation_steps=2), resume=True)
    losses = [[record["loss"] for record in curve(result.run) if "loss" in record] for result in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_skipped_step_empties_the_states(carrying: Callable[..., Run]) -> None:
    run = carrying("run")
    model = Gecko(run.model)
    carried = CarriedState(run, model, Ranks())
    empty = carried.tensors()
    batch = batch_of_step(run, load_data(run, Ranks()).rows, 0, Ranks())
    for skipped in (False, True):
        compute_gradients(model, split_batch(batch, 1, CPU), "float32", carried=carried)
        carried.clear() if skipped else carried.advance()
        same = all(torch.equal(x, empty[name]) for name, x in carried.tensors().items())
        assert same == skipped


def test_what_carries_no_state_is_refused(carrying: Callable[..., Run]) -> None:
    run = carrying("run")
    with pytest.raises(ValueError, match="all batches must have one shape"):
        replace(run, schedule=ScheduleSettings(initial_batch_size=1))
    with pytest.raises(ValueError, match="a row holds whole chats"):
        DataSettings(format="chat", carry_state=True)
    with pytest.raises(ValueError, match="false for a Llama"):
        replace(run, model=LlamaConfig.preset("llama-tiny"))
