"""The table of kernels is made without a card, whose launches are faked or left out."""

from __future__ import annotations

import lzma
from collections import Counter

import torch
from gpu.beforehand import Recording
from gpu.items import training
from gpu.kernel_times import Meter, kernel_name, measure
from gpu.page import page
from gpu.record import Record
from gpu.timing import Bench
from gpu.variants import Variant, applied, sized
from kernels.recording import launches

from gecko.config import GeckoConfig
from gecko.ops.backends.dispatch import Launch
from gecko.ops.feed_forward.triton import _product

BENCH = Bench(torch.device("cpu"), 2)
RECORDING = Recording(torch.device("cpu"))


def step() -> None:
    training.Steps.of(GeckoConfig.preset("tiny"), 1, 128, RECORDING).gradients()


def test_every_launch_of_a_step_is_measured():
    names, found = Counter(), {}
    launches(step, lambda launch: names.update([kernel_name(launch)]))
    launches(lambda: found.update((x["kernel"], x["launches"]) for x in measure("a step", step, BENCH)), lambda _: None)
    assert names["timestep_norm.normalise_tiles"] >= 2 and names["cema.filter_kernel"] >= 1
    assert {name: found[name] for name in names} == dict(names)
    assert {name for name in found if name not in names} >= {"torch.mm", "torch.embedding"}


class Adds:
    """A kernel that adds x to y."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, launch: Launch) -> None:
        self.runs += 1
        launch.arguments["p_y"].data.add_(launch.arguments["p_a"])


def addition() -> Launch:
    return Launch(_product, (1,), {"p_a": torch.arange(1.0, 5.0), "p_y": torch.full((4,), 2.0)}, warps=4)


def test_a_kernel_is_timed_on_its_real_arguments_which_are_restored(monkeypatch):
    launch, adds = addition(), Adds()
    monkeypatch.setattr(Launch, "run", adds)
    meter = Meter(BENCH)
    for _ in range(2):
        meter.launch(launch)
    assert launch.arguments["p_y"].tolist() == [4.0, 6.0, 8.0, 10.0]  # twice, whatever was timed
    ((name, (count, seconds)),) = meter.found.items()
    assert (name, count) == ("feed_forward._product", 2) and seconds > 0
    assert adds.runs > 4


def test_an_operation_that_changes_its_arguments_is_timed_and_they_are_restored():
    x, found = torch.zeros(3), measure("a step", lambda: x.add_(1), BENCH)
    assert [(row["kernel"], row["launches"]) for row in found] == [("torch.add_", 1)]
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_variants_that_are_applied_are_measured(monkeypatch):
    """A variant that wins is timed in a step."""
    seen: list[Launch] = []
    monkeypatch.setattr(Launch, "run", seen.append)
    variant = Variant("a family", "2 warps", ("feed_forward._product",), change=lambda launch: sized(launch, warps=2))
    with applied(variant):
        list(measure("a step", lambda: addition().run(), BENCH))
    assert {x.warps for x in seen} == {2}


def test_the_page_puts_measured_beside_predicted(tmp_path, monkeypatch):
    record, step = Record(tmp_path / "card.jsonl"), "tiny, 128 tokens"
    record.add("facts", {"table": "facts", "command": "a", "hardware": "Card; 1 core", "repeats": 20, "warm_ups": 5})
    monkeypatch.setattr("gpu.page.PREDICTIONS", tmp_path / "predictions.csv.xz")
    predicted = f'step,kernel,seconds,bytes,flops\n"{step}",cema.filter_kernel,2e-3,3e9,4e12\n'
    (tmp_path / "predictions.csv.xz").write_bytes(lzma.compress(predicted.encode()))
    record.add("rates", {"table": "rates", "copy": 1e12, "products": 5e14, "peak": 1e15})
    for name, seconds in (("torch.mm", 1e-3), ("cema.filter_kernel", 4e-3)):
        row = {"table": "kernels", "step": step, "kernel": name, "launches": 2, "seconds": seconds}
        record.add("kernels", row)
    text = "\n".join(page(record))
    # 4e12 FLOPs at 5e14 a second are 8 ms, more than 3e9 bytes at 1e12 a second.
    assert "| cema.filter_kernel | 2 | 4,000.0 | 80.0% | 2,000.0 | 3,000.0 | 4,000.0 | 8,000.0 | 200.0% |" in text
    assert text.index("cema.filter_kernel") < text.index("| torch.mm | 2 | 1,000.0 | 20.0% |  |  |  |  |  |")
    assert f"Kernels of a training step: {step}, one block" in text
