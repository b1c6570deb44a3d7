"""The table of kernels is made without a card, whose launches are faked or left out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gpu.kernel_page import Prediction, kernel_sections, read_predictions, write_predictions
from gpu.kernel_times import KernelTime, Meter, measure
from gpu.record import Record
from gpu.steps import Step, kernel_name, visit_launches
from gpu.timing import Bench, Rates

from gecko.ops.backends.dispatch import Launch
from gecko.ops.feed_forward.triton import _product

CPU = torch.device("cpu")
BENCH = Bench(CPU, torch.float32, 2, 1)
STEP = Step("tiny", 128)


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "card.jsonl")
    record.describe(command="a command", hardware="Card; 1 core", dtype="bfloat16", repeats=20, warm_ups=5)
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
    """A kernel that adds x to y."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, launch: Launch) -> None:
        self.runs += 1
        launch.arguments["p_y"].data.add_(launch.arguments["p_a"])


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
    assert adds.runs > 4


def test_the_page_puts_measured_beside_predicted(record, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu.kernel_page.PREDICTIONS", tmp_path / "predictions.json")
    predicted = Prediction("cema.filter_kernel", 2, 2e-3, 3e9, 4e12, 5e6, "instructions")
    write_predictions({str(STEP): [predicted]}, tmp_path / "predictions.json")
    assert read_predictions(str(STEP)) == {"cema.filter_kernel": predicted}
    for name, seconds in (("torch.mm", 1e-3), ("cema.filter_kernel", 4e-3)):
        record.add("kernels", KernelTime(str(STEP), name, 2, seconds))
    text = "\n".join(kernel_sections(record, Rates(copy=1e12, products=5e14, peak=1e15)))
    # 4e12 FLOPs at 5e14 a second are 8 ms, more than 3e9 bytes at 1e12 a second.
    assert "| cema.filter_kernel | 2 | 4,000.0 | 80.0% | 2,000.0 | 3,000.0 | 4,000.0 | 8,000.0 | 200.0% |" in text
    assert text.index("cema.filter_kernel") < text.index("| torch.mm | 2 | 1,000.0 | 20.0% | | | | | |")
