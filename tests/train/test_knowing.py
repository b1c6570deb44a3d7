"""What a run reports: the text of a step, a trace, its use of the hardware, its metrics in other tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gecko.config import PRESETS
from gecko.models.gecko import Gecko
from gecko.train import Run, replayed, train
from gecko.train import throughput as utilisation
from gecko.train.metrics import MetricsWriter, read_metrics
from gecko.train.throughput import ProfileWindow, flops_per_token
from gecko.train.trainer import Trainer


def test_replay_shows_what_the_step_read(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[int, list[list[int]]] = {}
    original = Trainer._step

    def stepping(self: Trainer) -> None:
        read[self.next_step] = self.batches.batch(self.next_step - 1).tokens.tolist()
        original(self)

    monkeypatch.setattr(Trainer, "_step", stepping)
    run = replace(small_run, steps=3)
    train(run)
    for step, rows in read.items():
        lines = list(replayed(run, step))
        assert lines[0].startswith(f"step {step}: 2 rows of 24 tokens, ")
        starts = [index for index, line in enumerate(lines) if line.startswith("row ")]
        for row, begin, end in zip(rows, starts, [*starts[1:], len(lines)], strict=True):
            texts = [eval(line.partition(": ")[2]) for line in lines[begin + 1 : end]]
            assert "".join(texts) == bytes(token for token in row if token < 256).decode()
    with pytest.raises(ValueError, match="counted from 1"):
        list(replayed(run, 0))
    with pytest.raises(ValueError, match="the run has 3 steps; got 4"):
        list(replayed(run, 4))


def test_the_profiled_steps_are_those_of_the_window(small_run: Run) -> None:
    train(replace(small_run, profile=(3, 4), steps=6))
    (trace,) = (small_run.folder / "profile").iterdir()
    assert trace.name == "steps-3-4-rank-00000.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if str(name).startswith("step ")} == {"step 3", "step 4"}


def test_a_run_that_goes_on_behind_its_window_says_so(small_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run = replace(small_run, profile=(3, 4))
    train(replace(run, steps=4))
    train(replace(run, steps=6), resume=True)
    assert "profile=3,4 lies before that: no trace is written\n" in capsys.readouterr().out
    train(replace(run, steps=8, profile=(6, 7)), resume=True)
    assert "lies before" not in capsys.readouterr().out


def test_a_window_past_the_end_is_written_by_finish(tmp_path: Path) -> None:
    window = ProfileWindow((2, 9), tmp_path, 0)
    for number in (1, 2, 3):
        with window.step(number):
            torch.ones(2).sum()
    assert not list(tmp_path.iterdir())
    window.finish()
    assert [trace.name for trace in tmp_path.iterdir()] == ["steps-2-3-rank-00000.json"]


def test_sessions_that_share_a_window_each_leave_their_part(small_run: Run) -> None:
    run = replace(small_run, profile=(3, 6))
    train(replace(run, steps=4))
    train(replace(run, steps=8), resume=True)
    traces = sorted((small_run.folder / "profile").iterdir())
    assert [trace.name for trace in traces] == ["steps-3-4-rank-00000.json", "steps-5-6-rank-00000.json"]


def test_every_step_has_its_numbers(small_run: Run) -> None:
    train(small_run)
    records = [record for record in read_metrics(small_run.folder / "metrics.jsonl") if record["kind"] == "train"]
    for record in records:
        assert 0 < record["mfu"] < 1.5
        assert 0.01 < record["memory_gib"] < 100
        assert 0 <= record["data_seconds"] < 10
    board = list((small_run.folder / "tensorboard").iterdir())
    assert board, "TensorBoard is part of the train extra"


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 990e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A40", 150e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_a_peak_is_of_the_device_whose_name_it_has(
    monkeypatch: pytest.MonkeyPatch, name: str, flops: float | None
) -> None:
    """The name must match exactly; otherwise the peak is None and is measured."""
    monkeypatch.setattr(utilisation, "PEAK_FLOPS", {**utilisation.PEAK_FLOPS, "GH200": 990e12})
    monkeypatch.setattr(utilisation, "_measured_flops", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert utilisation.peak_flops(torch.device("cuda"), torch.bfloat16) == flops


def test_a_gpu_is_measured_by_products_that_take_longer_than_to_start_them() -> None:
    """A launch takes about 10 µs; on the fastest card of the table the products take forty times that."""
    size, _ = utilisation._MEASURED["cuda"]
    assert 2 * size**3 / max(utilisation.PEAK_FLOPS.values()) > 40 * 1e-5


def test_a_measured_peak_counts_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(utilisation.time, "perf_counter", lambda: next(clock))
    monkeypatch.setitem(utilisation._MEASURED, "cpu", (16, 3))
    assert utilisation._measured_flops.__wrapped__(torch.device("cpu"), torch.float32, 1) == 3 * 2 * 16**3


@pytest.mark.parametrize(("platform", "reported"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_memory_is_counted_in_the_unit_of_the_system(
    monkeypatch: pytest.MonkeyPatch, platform: str, reported: int
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(utilisation.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=reported))
    assert utilisation.memory_gib(torch.device("cpu")) == 3


@pytest.mark.parametrize("name", PRESETS)
def test_flops_are_six_a_parameter_and_what_attention_and_memory_add(name: str) -> None:
    config = PRESETS[name]
    with torch.device("meta"):
        model = Gecko(config)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and ("fc" in n or "to_" in n))
    matrices += config.vocab_size * config.model_dim
    flops = flops_per_token(config, 1024)
    assert 6 * matrices < flops < 6 * matrices * 2
    window_gone = replace(config, memory="none", chunk_size=1, attention="chunk")
    assert flops_per_token(window_gone, 1024) == pytest.approx(6 * matrices, rel=1e-3)


def test_weights_and_biases_gets_every_number_and_the_run_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []

    def init(**arguments: Any) -> SimpleNamespace:
        calls.append(arguments)
        ignore: Callable[..., None] = lambda *a, **k: None  # noqa: E731
        return SimpleNamespace(log=logged.append, finish=ignore, define_metric=ignore)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    for step in (None, 1):
        with MetricsWriter(tmp_path, step, "project", {"seed": 0}) as metrics:
            metrics.write("train", 1, {"loss": 2.0, "skipped": "a cause"})
    assert [call["project"] for call in calls] == ["project"] * 2
    assert calls[0]["id"] == calls[1]["id"]
    assert logged == [{"step": 1, "train/loss": 2.0}] * 2


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"gecko-lm\[wandb\]"):
        MetricsWriter(tmp_path, None, "project")
