"""The table of kernels and the sweep over warps and stages run without a card, whose launches are faked or left out."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from gpu.kernel_page import Prediction, kernel_sections, read_predictions, write_predictions
from gpu.kernel_times import KernelTime, Meter, measure
from gpu.record import Record
from gpu.steps import Step, kernel_name, visit_launches
from gpu.sweep import Place, Swept, places, swept, variants
from gpu.timing import Bench, Rates

from gecko.ops.backends.dispatch import Launch
from gecko.ops.feed_forward.triton import _product

CPU = torch.device("cpu")
BENCH = Bench(CPU, torch.float32, 2, 1)
STEP = Step("tiny", 128)


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "card.json")
    record.describe("a command", hardware="Card; 1 core; PyTorch 2", dtype="bfloat16", repeats=20, warm_ups=5)
    return record


def launched(step: Step) -> Counter[str]:
    names: Counter[str] = Counter()
    visit_launches(step.prepare(CPU), CPU, lambda launch: names.update([kernel_name(launch)]))
    return names


def test_every_launch_of_a_step_is_measured():
    found = {x.kernel: x.launches for x in measure(STEP, BENCH)}
    launches = launched(STEP)
    assert launches["timestep_norm.normalise_tiles"] == 2 and launches["cema.filter_kernel"] >= 1
    assert {name: found[name] for name in launches} == dict(launches)
    assert {name for name in found if name not in launches} >= {"torch.mm", "torch.embedding"}


class Adds:
    """A kernel that adds x to y: with 8 warps it adds too much, with 3 stages it does not run."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def __call__(self, launch: Launch) -> None:
        self.runs.append((launch.warps, launch.stages))
        if launch.stages == 3:
            raise ValueError("out of resource: shared memory")
        x, y = launch.arguments["p_a"], launch.arguments["p_y"]
        y.data.add_(x if launch.warps < 8 else 1.5 * x)


def addition() -> Launch:
    return Launch(_product, (1,), {"p_a": torch.arange(1.0, 5.0), "p_y": torch.full((4,), 2.0)}, warps=4)


def test_a_kernel_is_timed_on_its_real_arguments_which_are_restored():
    launch, adds = addition(), Adds()
    meter = Meter(BENCH, adds)
    for _ in range(2):
        meter.launch(launch)
    assert launch.arguments["p_y"].tolist() == [4.0, 6.0, 8.0, 10.0]  # twice, whatever was timed
    ((name, (count, seconds)),) = meter.found.items()
    assert (name, count) == ("feed_forward._product", 2) and seconds > 0
    assert len(adds.runs) > 4


def test_variants_run_on_the_same_arguments_and_wrong_ones_are_told():
    launch = addition()
    found = {(x.warps, x.stages): x for x in swept("a step", launch, BENCH, Adds())}
    assert list(found) == [(4, 1), (2, 1), (2, 2), (2, 3), (4, 2), (4, 3), (8, 1), (8, 2), (8, 3)]
    assert [x.chosen for x in found.values()] == [True] + [False] * 8
    assert launch.arguments["p_y"].tolist() == [2.0] * 4
    assert {key for key, x in found.items() if x.seconds is None} == {(2, 3), (4, 3), (8, 3)}
    assert "shared memory" in found[2, 3].reason
    assert found[2, 1].difference == found[4, 2].difference == 0.0
    assert found[8, 1].difference > 0.1 and found[8, 2].difference > 0.1


def test_what_no_variant_writes_is_equal():
    launch = addition()
    launch.arguments["p_y"][3] = float("nan")
    launch.arguments["p_a"][2] = float("inf")
    differences = [x.difference for x in swept("a step", launch, BENCH, Adds()) if x.warps < 8 and x.stages < 3]
    assert differences == [0.0] * 4


def test_the_largest_launch_of_each_kernel_is_swept():
    found = places(STEP)
    assert {place.kernel for place in found} == set(launched(STEP))
    assert len(found) == len({place.kernel for place in found})
    assert all(kernel_name(launch) == place.kernel for place, launch in found.items())
    norm = next(launch for place, launch in found.items() if place == Place("timestep_norm.normalise_tiles", 0))
    assert [x.warps for x in variants(norm)[:1]] == [norm.warps]
    assert max(x.warps for x in variants(dataclasses.replace(norm, warps=16))) == 16


def test_the_page_puts_measured_beside_predicted(record, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu.kernel_page.PREDICTIONS", tmp_path / "predictions.json")
    predicted = Prediction("cema.filter_kernel", 2, 2e-3, 3e9, 4e12, 5e6, "instructions")
    write_predictions({str(STEP): [predicted]}, tmp_path / "predictions.json")
    assert read_predictions(str(STEP)) == {"cema.filter_kernel": predicted}
    record.begin("kernels", ["kernels"])
    record.begin_task("kernels", "a step")
    for name, seconds in (("torch.mm", 1e-3), ("cema.filter_kernel", 4e-3)):
        record.add("kernels", "a step", KernelTime(str(STEP), name, 2, seconds))
    sizes = [(4, 1, 1e-3, 0.0), (8, 1, 2e-4, 0.5), (2, 1, 5e-4, 1e-3)]
    for warps, stages, seconds, difference in sizes:
        record.add("kernels", "a step", Swept(str(STEP), "norm", warps, stages, warps == 4, seconds, difference))
    record.add("kernels", "a step", Swept(str(STEP), "norm", 2, 3, False, reason="failed"))
    text = "\n".join(kernel_sections(record, Rates(copy=1e12, products=5e14, peak=1e15)))
    # 4e12 FLOPs at 5e14 a second are 8 ms, more than 3e9 bytes at 1e12 a second.
    assert "| cema.filter_kernel | 2 | 4,000.0 | 80.0% | 2,000.0 | 3,000.0 | 4,000.0 | 8,000.0 | 200.0% |" in text
    assert text.index("cema.filter_kernel") < text.index("| torch.mm | 2 | 1,000.0 | 20.0% | | | | | |")
    assert "| norm | 4 × 1 | 1,000.0 | 2 × 1 | 500.0 | 50% | 1 | 8 × 1: 5.0e-01 |" in text
