"""The host waits for nothing between a batch and the optimizer, shown on an emulated device."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.corpora import BYTE_MODEL, random_batch
from support.emulated_device import DEVICE, EmulatedDevice, move
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gecko.data import Batch
from gecko.models.gecko import Gecko
from gecko.parallel.mesh import Ranks
from gecko.train import DataSettings, OptimizerSettings, Run, SkipSettings
from gecko.train import step as steps
from gecko.train.data import AHEAD, Prefetcher
from gecko.train.optimizer import build_optimizer
from gecko.train.step import CarriedState, SpikeRule, Step, StepResult, Verdict, split_batch


class Watched(TorchDispatchMode):
    """Under any mode, operators run in PyTorch's operations."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_autocast() -> Iterator[None]:
    """The device type ``meta`` has no autocast."""
    with (
        mock.patch.object(steps, "autocast", lambda *_: nullcontext()),
        mock.patch("torch.autocast", lambda *_, **__: nullcontext()),
        mock.patch("torch.is_autocast_enabled", lambda *_: False),
    ):
        yield


def batches(run: Run, count: int) -> list[Batch]:
    return [random_batch(seed, run.batch_size, run.sequence_length) for seed in range(count)]


def started(run: Run, model: Gecko, device: torch.device, count: int = 4) -> list[StepResult]:
    """Start all steps, then read their numbers."""
    optimizer = build_optimizer(model, run.optimizer)
    rule = SpikeRule(SkipSettings(window=4), device=device)
    carried = CarriedState(run, model, Ranks()) if run.data.carry_state else None
    step = Step(model, optimizer, 1.0, "float32", rule, carried=carried)
    found = []
    for batch in batches(run, count):
        parts = split_batch(batch, run.gradient_accumulation_steps, device)
        found.append(step.start(parts, 1e-2))
        if carried is not None:
            carried.advance()
    return [one.wait() for one in found]


def tiny_run(**changes: object) -> Run:
    return replace(Run(BYTE_MODEL, "runs/tiny", batch_size=4, sequence_length=40, steps=4), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "data": DataSettings(carry_state=True)},
        {"optimizer": OptimizerSettings(name="muon")},
        {"model": replace(BYTE_MODEL, attention="sliding_window", timestep_betas=None)},
    ],
    ids=["carried state", "muon", "another variant"],
)
def test_a_step_reads_nothing_from_the_device(changes: dict[str, object]) -> None:
    """Of each step, one copy goes to the host, which does not wait for it. The numbers are those of the CPU."""
    run = tiny_run(**changes)
    torch.manual_seed(0)
    model = Gecko(run.model)
    whole = copy.deepcopy(model)
    with EmulatedDevice() as device:
        move(model)
        found = started(run, model, DEVICE)
    assert device.waits == []
    assert device.copies_to_host == len(found)
    with Watched():
        expected = started(run, whole, torch.device("cpu"))
    assert [step.loss for step in found] == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert {step.verdict for step in found} == {Verdict.TAKEN}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_after_a_skipped_step_nothing_changes_until_the_host_knows(name: str) -> None:
    """Neither weights nor the optimizer's state; then the step is as if the skipped one had not been."""
    run = tiny_run(optimizer=OptimizerSettings(name=name))
    torch.manual_seed(0)
    model = Gecko(run.model)
    optimizer, rule = build_optimizer(model, run.optimizer), SpikeRule(SkipSettings())
    step = Step(model, optimizer, 1.0, "float32", rule)
    first, second = batches(run, 2)

    def one_step(batch: Batch, factor: float) -> Verdict:
        hook = model.final_norm.register_forward_hook(lambda m, i, out: (out[0] * factor, *out[1:]))
        found = step.start(split_batch(batch, 2, torch.device("cpu")), 1e-2).wait()
        hook.remove()
        return found.verdict

    def everything() -> list[Tensor]:
        states = [x for state in optimizer.state.values() for x in state.values()]
        return [x.detach().clone() for x in (*model.parameters(), *states)]

    assert one_step(first, 1.0) is Verdict.TAKEN
    before = everything()
    assert one_step(second, float("nan")) is Verdict.NOT_FINITE
    assert one_step(first, 1.0) is Verdict.HELD
    assert all(map(torch.equal, everything(), before))
    rule.release()
    assert one_step(first, 1.0) is Verdict.TAKEN
    assert not any(map(torch.equal, everything(), before))


def test_batches_are_made_several_steps_ahead() -> None:
    run, made = tiny_run(batch_size=2), []

    def rows(indices: range) -> Batch:
        made.append(indices.start)
        index = torch.tensor(indices)[:, None].expand(-1, run.sequence_length)
        return Batch(index, index, index)

    prefetcher = Prefetcher(run, rows, Ranks())
    assert prefetcher.batch(0).tokens[:, 0].tolist() == [0, 1]
    prefetcher._executor.submit(lambda: None).result()  # after all that was submitted before
    assert made == [0, 2, 4, 6, 8] and AHEAD == 4
    for step in (1, 2, 7, 7, 8, 0):
        assert prefetcher.batch(step).tokens[:, 0].tolist() == [2 * step, 2 * step + 1]
