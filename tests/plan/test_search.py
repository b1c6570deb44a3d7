"""Settings that are found for a number of GPUs fit, and none that fit are faster."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from plan.test_dry_run import GECKO, run_of

from gecko.parallel.mesh import MeshSizes
from gecko.plan import GPU, GPUS, Assumptions, Plan, _plans, find_gpu, find_plan, make_plan
from gecko.plan.counts import RESERVE, inference_memory, serving, step_memory
from gecko.recipes import get_recipe
from gecko.train import Run

pytest.importorskip("triton")

RUN = run_of(replace(GECKO, num_layers=1, vocab_size=8000), MeshSizes(), batch_size=2)
SLOW = Assumptions()


def gpu_of(memory: int) -> GPU:
    return replace(GPUS["h100"], memory=memory)


def found(run: Run, gpus: int, gpu: GPU, kept: Iterable[str] = ()) -> tuple[Plan, list[Plan]]:
    measured: list[Plan] = []
    return find_plan(run, gpus, gpu, SLOW, set(kept), measured.append), measured


@pytest.fixture(scope="module")
def all_plans() -> Iterator[list[Plan]]:
    """Yield the plans of every setting of ``RUN`` on two GPUs, from the least memory; each is measured once."""
    known: dict[object, tuple[dict[str, int], str]] = {}

    def remembered(run: Run, sizes: MeshSizes) -> tuple[dict[str, int], str]:
        settings = sizes, run.activation_checkpointing, run.gradient_accumulation_steps
        if settings not in known:
            known[settings] = step_memory(run, sizes)
        return known[settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gecko.plan.step_memory", remembered)
        plans = sorted(_plans(RUN, 2, GPUS["h100"], SLOW, ()), key=lambda plan: plan.total)
        assert len(known) == 12
        yield plans


def test_no_setting_that_fits_with_some_room_is_faster(all_plans: list[Plan]) -> None:
    for memory in (plan.total for plan in all_plans):
        plan, measured = found(RUN, 2, gpu_of(memory))
        fit = [other for other in all_plans if other.total - RESERVE <= 0.9 * (memory - RESERVE)]
        assert plan.fits and plan.total <= memory
        assert all(plan.step_seconds <= other.step_seconds for other in fit)
        assert len({id(one) for one in measured}) < 8


def test_a_run_that_fits_stays_as_it_is() -> None:
    plan, measured = found(RUN, 1, find_gpu("h100"))
    assert plan.run == RUN and measured == [plan]


def test_where_none_fits_it_is_the_one_that_needs_least(all_plans: list[Plan]) -> None:
    plan, _ = found(RUN, 2, gpu_of(all_plans[0].total - 1))
    assert plan.fits is False and plan.total == all_plans[0].total


@pytest.mark.parametrize("name", ["replicate", "context", "activation_checkpointing", "gradient_accumulation_steps"])
def test_what_is_set_stays(all_plans: list[Plan], name: str) -> None:
    of_mesh = hasattr(RUN.parallel, name)
    plan, _ = found(RUN, 2, gpu_of(all_plans[0].total), [f"parallel.{name}" if of_mesh else name])
    after, before = (getattr(run.parallel if of_mesh else run, name) for run in (plan.run, RUN))
    assert after == before
    assert plan.run.tokens_per_step == RUN.tokens_per_step and plan.gpus == 2


def test_without_kernels_it_is_the_one_that_needs_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gecko.plan.triton_kernels_installed", lambda: False)
    plan, _ = found(get_recipe("gecko_7b"), 8, find_gpu("h100"))
    assert plan.fits is None and plan.rows == 1 and plan.divided == 8
    assert plan.run.activation_checkpointing == "full"


def test_the_command_starts_a_process_per_gpu() -> None:
    run = get_recipe("tiny")
    launched = {
        1: "gecko train tiny",
        4: "torchrun --nproc-per-node 4 -m gecko train tiny",
        12: "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint HEAD:29500 -m gecko train tiny",
    }
    for gpus, command in launched.items():
        assert make_plan(replace(run, batch_size=12), gpus, GPUS["h100"], SLOW).command == command


def test_batches_that_grow_are_planned_at_their_end() -> None:
    grown = RUN.with_settings("batch_size=16", "schedule.initial_batch_size=4", "schedule.batch_size_steps=8")
    memory = [make_plan(run, 1, GPUS["h100"], SLOW).memory for run in (grown, RUN.with_settings("batch_size=16"))]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("memory", [5 * 10**9, 80 * 10**9])
def test_as_many_rows_are_served_as_fit(memory: int) -> None:
    rows = serving(GECKO, memory)
    weights, state, work = inference_memory(GECKO, torch.bfloat16, 1, 4096).values()
    assert rows is not None and (rows["weights_bytes"], rows["row_bytes"]) == (weights, state)
    for number, share, states in ((rows["gecko_serve_rows"], 1.0, 2), (rows["vllm_rows"], 0.9, 1)):
        free = int(share * memory) - RESERVE - weights - work
        assert number * states * state <= free < (number + 1) * states * state or (free < 0 and number == 0)


def test_rows_of_a_llama_are_not_constant_and_none_are_named() -> None:
    assert serving(get_recipe("llama2_7b").model, 80 * 10**9) is None
    assert serving(get_recipe("gecko_7b").model, 10**9) | {"weights_bytes": 0, "row_bytes": 0} == {  # type: ignore[operator]
        "weights_bytes": 0, "row_bytes": 0, "gecko_serve_rows": 0, "vllm_rows": 0,
    }  # fmt: skip
