"""What a run reports and records."""

import json
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.corpora import as_shards

from gecko.config import PRESETS, Attention
from gecko.data import ShardFolder
from gecko.data.packing import ROW_LAYOUT
from gecko.data.shards import ShardedRows, SplitShards
from gecko.experiments.compare.plan import evaluation_of
from gecko.experiments.inputs import gather
from gecko.experiments.rows import long_table
from gecko.io.checkpoints import read_manifest
from gecko.models.gecko import Gecko
from gecko.pages import chunk_borders
from gecko.runtime.process import code_name, code_version
from gecko.runtime.tensors import memory_gib
from gecko.train import Run, SampleSettings, TrainResult, replayed, train
from gecko.train import throughput as utilisation
from gecko.train.checkpoints import write_manifest
from gecko.train.evaluate import Evaluation
from gecko.train.finish import MARKS, loss_curve, step_curve, write_report
from gecko.train.metrics import DATA, SESSIONS, DataRecord, MetricsWriter, read_metrics, read_sessions, row_layout
from gecko.train.settings import flatten
from gecko.train.throughput import flops_per_token
from gecko.train.trainer import Trainer

# ---- The report is one page without external files, in which text is escaped.


def strict(path: Path) -> Any:
    """Return the content of a JSON file, which must have no NaN or Infinity."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


NAN = float("nan")
LOSSES = [(2.5, 1.25, [5.0, 2.5]), (2.5, NAN, [5.0, 2.5]), (NAN, NAN, [NAN, 2.5]), (float("inf"), NAN, [NAN, NAN])]


@pytest.mark.parametrize("loss, per_byte, rows", LOSSES)
def test_results_are_json_and_all_readers_take_them(
    finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: float, per_byte: float,
    rows: list[float],
) -> None:  # fmt: skip
    given = Evaluation(loss, per_byte, [None, *([loss] * 23)], 1, 3, rows, [2, 1])
    monkeypatch.setattr("gecko.train.finish.evaluate", lambda *_: given)
    assert train(finished, resume=True).finished
    written, found = strict(finished.folder / "results.json"), evaluation_of(finished)
    assert found is not None
    numbers = np.array([[x.loss, x.nats_per_byte, *x.row_losses] for x in (given, found)])
    expected = np.where(np.isfinite(numbers[0]), numbers[0], NAN)
    assert np.array_equal(numbers[1], expected, equal_nan=True)
    assert [written["loss"], written["nats_per_byte"]] == [x if np.isfinite(x) else None for x in (loss, per_byte)]
    scores = {row.score for row in long_table(gather([finished.folder])) if row.score.startswith("nats per")}
    assert scores == {name for name, x in (("nats per token", loss), ("nats per byte", per_byte)) if np.isfinite(x)}
    no_text = np.isfinite(loss) and not np.isfinite(per_byte)
    assert ("nats per token; the held-out part has no text" in capsys.readouterr().out) == no_text


def test_the_page_of_a_run(small_run: Run) -> None:
    mixture = replace(small_run.data, sources=("prose=0.75", "code=0.25"))
    run = replace(small_run, data=mixture, sample=SampleSettings(prompt="<script>alert(1)</script>"))
    with MetricsWriter(run.folder, None) as metrics:
        metrics.write("validation", 0, {"loss": 5.5, "row_losses": [11.0, 12.0, 10.0]})
        for step in range(1, 13):
            loss = float("nan") if step == 3 else 5.0 / step
            skipped = {"skipped": "the output of x"} if step == 3 else {}
            speeds = {"seconds": step, "tokens_per_second": 48.0, "learning_rate": 0.01 / step, "grad_norm": loss}
            metrics.write("train", step, {"loss": loss, **speeds, **skipped})
        metrics.write("validation", 12, {"loss": float("nan")})
    evaluation = Evaluation(2.5, 1.25, [None, *([2.5] * 23)], 1, 100)
    facts = evaluation, 1234, "red ", "</pre><img src=x>&", {"Processor": "<b>fast</b>"}
    page = write_report(run, *facts).read_text(encoding="utf-8")
    # It loads nothing from elsewhere, and text is escaped.
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)[^\"'#>\s]", re.sub(r"&\w+;|xlink:href=\"#", "", page)
                         .replace("src=x", ""))  # fmt: skip
    assert "<script" not in page and "@import" not in page
    for text in (
        "&lt;script&gt;alert(1)&lt;/script&gt;", "&lt;/pre&gt;&lt;img src=x&gt;&amp;", "&lt;b&gt;fast&lt;/b&gt;",
        "1.2500 nats per byte", "of which skipped: 1", "optimizer.learning_rate", "gecko train", "1,234",
        code_name(code_version()), "12 steps on prose=0.75, code=0.25: held-out loss",
        "Held out: the same 3 rows each time",
    ):  # fmt: skip
        assert text in page
    assert page.count("<svg") == 5
    # Settings are grouped and folded.
    groups = re.findall(r"<details><summary>(\w+) <small>\((\d+)\)</small></summary>(.*?)</details>", page, re.DOTALL)
    assert [name for name, _, _ in groups][:4] == ["Run", "Model", "Data", "Optimizer"]
    assert all(content.count("<tr>") == int(count) for _, count, content in groups)
    shown = {name: value for *_, content in groups for name, value in re.findall("row.>(.*?)</th><td>(.*?)<", content)}
    assert shown.keys() == {name for name in flatten(small_run.to_dict()) if name != "overrides"}
    assert shown["optimizer.learning_rate"] == "0.01"


@pytest.mark.parametrize("steps", [1, 8, 300])
def test_axes_fit_the_run(steps: int) -> None:
    training = [{"step": step, "loss": 5 / step} for step in range(1, steps + 1)]
    axes = loss_curve(training, [{"step": 0, "loss": 6.0}, {"step": steps, "loss": 1.0}], MARKS).axes[0]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left == 0 and steps < right <= 1.1 * steps
    assert all(tick == int(tick) for tick in axes.get_xticks())
    shown = [loss for record in training if low <= (loss := record["loss"]) <= high]
    assert len(shown) == steps if steps < 50 else len(shown) >= 0.9 * steps
    assert (low <= 6.0 <= high) == (steps < 50)
    assert [text.get_text() for text in axes.texts] == [words for loss, words in MARKS.items() if low < loss < high]


def test_a_spike_of_the_gradient_norm_does_not_hide_the_rest() -> None:
    records = [{"step": step, "grad_norm": 1.0} for step in range(1, 100)]
    assert step_curve(records, "grad_norm", "norm").axes[0].get_yscale() == "linear"
    records[50]["grad_norm"] = 1e4
    assert step_curve(records, "grad_norm", "norm").axes[0].get_yscale() == "log"
    assert step_curve(records, "learning_rate", "rate") is None


def test_chunk_borders() -> None:
    """Many are thinned."""
    assert [chunk_borders(length, 8) for length in (24, 8, 25)] == [[8, 16], [], [8, 16, 24]]
    borders = chunk_borders(32_768, 64)
    assert 20 < len(borders) <= 40
    assert all(border % 64 == 0 for border in borders)


# ---- A run records code and machine of each of its sessions.


def test_every_session_leaves_a_line_and_a_new_run_starts_a_new_file(small_run: Run) -> None:
    small_run.folder.mkdir()
    (small_run.folder / SESSIONS).write_text('{"step": 0}\n')
    train(replace(small_run, steps=3))
    train(small_run, resume=True)
    first, second = read_sessions(small_run.folder)
    assert (first["step"], second["step"]) == (0, 3)
    for line in (first, second):
        assert {"version": line["version"], "commit": line["commit"]} == code_version()
        assert line["parameters"] == sum(p.numel() for p in Gecko(small_run.model).parameters())
        assert "PyTorch" in line["hardware"]["Software"]


@pytest.mark.parametrize("told_by", ["checkpoint", "sessions", "neither"])
def test_who_says_what_a_run_was_trained_on(
    small_run: Run, corpus: Path, tmp_path: Path, told_by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of earlier versions do not record it: then the sessions do; without those the run prints a notice."""
    shutil.copytree(corpus, tmp_path / "texts")
    (tmp_path / "texts" / "0-new.txt").write_text("one more document")
    run = replace(small_run, steps=4, data=replace(small_run.data, source=str(tmp_path / "texts")))
    checkpoint = train(run).checkpoint
    if told_by != "checkpoint":
        as_before(checkpoint)
    if told_by != "sessions":
        (run.folder / SESSIONS).unlink()
    (tmp_path / "texts" / "0-new.txt").write_text("another document!")
    longer = replace(run, steps=6)
    capsys.readouterr()
    if told_by != "neither":
        with pytest.raises(ValueError, match=r"the texts and the tokenizer must be those .* was begun with"):
            train(longer, resume=True)
        (tmp_path / "texts" / "0-new.txt").write_text("one more document")
    assert train(longer, resume=True).step == 6
    assert ("cannot check that the texts are those" in capsys.readouterr().out) == (told_by == "neither")


def as_before(checkpoint: Path) -> None:
    """Turn the checkpoint into one of a version that did not record its data."""
    (checkpoint / DATA).unlink()
    write_manifest(checkpoint, {name: entry for name, entry in read_manifest(checkpoint).items() if name != DATA})


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_run_keeps_the_rows_that_it_was_begun_with(
    small_run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """Earlier versions dropped the tokens of token shards that filled no row."""
    shards = as_shards([path.read_text() for path in sorted(corpus.glob("*.txt"))], tmp_path)
    run = replace(small_run, data=replace(small_run.data, source=shards))
    newest = train(replace(run, steps=2)).checkpoint
    if old:
        as_before(newest)
    layouts: list[int] = []
    rows = SplitShards.rows

    def looked_at(self: SplitShards, length: int) -> ShardedRows:
        layouts.append(self.layout)
        return rows(self, length)

    monkeypatch.setattr(SplitShards, "rows", looked_at)
    for steps in (4, 6):
        newest = train(replace(run, steps=steps), resume=True).checkpoint
        assert list(replayed(run, 1))
        assert DataRecord.load(newest) == DataRecord(ShardFolder.open(shards).digest, 1 if old else ROW_LAYOUT)
    assert layouts == [1 if old else ROW_LAYOUT] * 4


def test_a_newer_record_is_refused(tmp_path: Path) -> None:
    newer = ROW_LAYOUT + 1
    DataRecord("", newer).save(tmp_path)
    with pytest.raises(ValueError, match=rf"row layout from 1 to {ROW_LAYOUT}; got {newer}.*newer version"):
        row_layout(tmp_path)


# ---- What a run reports: the text of a step, a trace, its use of the hardware, its metrics in other tools.


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


def test_each_session_writes_the_steps_of_the_window_that_it_trains(
    small_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(small_run, profile=(3, 6))
    train(replace(run, steps=4))
    train(replace(run, steps=8), resume=True)
    traces = sorted((small_run.folder / "profile").iterdir())
    assert [trace.name for trace in traces] == ["steps-3-4-rank-00000.json", "steps-5-6-rank-00000.json"]
    names = {event.get("name") for event in json.loads(traces[0].read_text())["traceEvents"]}
    assert {name for name in names if str(name).startswith("step ")} == {"step 3", "step 4"}
    assert "lies before" not in capsys.readouterr().out
    train(replace(run, steps=9), resume=True)
    assert "profile=3,6 lies before that: no trace is written\n" in capsys.readouterr().out


def test_every_step_has_its_numbers(whole: TrainResult) -> None:
    records = [record for record in read_metrics(whole.run.folder / "metrics.jsonl") if record["kind"] == "train"]
    for record in records:
        assert 0 < record["mfu"] < 1.5
        assert 0.01 < record["memory_gib"] < 100
        assert 0 <= record["data_seconds"] < 10
    assert list((whole.run.folder / "tensorboard").iterdir()), "TensorBoard is part of the train extra"


def test_a_peak_is_of_the_device_whose_name_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name must match exactly; otherwise the peak is None and is measured."""
    monkeypatch.setattr(utilisation, "PEAK_FLOPS", {**utilisation.PEAK_FLOPS, "GH200": 990e12})
    monkeypatch.setattr(utilisation, "_measured_flops", lambda *_: None)
    peaks = {
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA GH200 480GB": 990e12,
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A40": 150e12, "NVIDIA RTX A4000": None,
        "NVIDIA GeForce RTX 4090": 165e12,
    }  # fmt: skip
    for name, flops in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert utilisation.peak_flops(torch.device("cuda"), torch.bfloat16) == flops


def test_a_measured_peak_counts_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the fastest GPU of the table they take forty times as long as a launch, about 10 µs."""
    size, _ = utilisation._MEASURED["cuda"]
    assert 2 * size**3 / max(utilisation.PEAK_FLOPS.values()) > 40 * 1e-5
    clock = iter(range(100))
    monkeypatch.setattr(utilisation.time, "perf_counter", lambda: next(clock))
    monkeypatch.setitem(utilisation._MEASURED, "cpu", (16, 3))
    assert utilisation._measured_flops.__wrapped__(torch.device("cpu"), torch.float32, 1) == 3 * 2 * 16**3


def test_memory_is_counted_in_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, reported in (("linux", 3 * 2**20), ("darwin", 3 * 2**30)):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(resource, "getrusage", lambda _, size=reported: SimpleNamespace(ru_maxrss=size))
        assert memory_gib(torch.device("cpu")) == 3


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
    of_one_key = config.num_layers * (config.key_dim + config.value_dim)
    assert flops_per_token(window_gone, 1024) == 6 * (matrices + of_one_key)


@pytest.mark.parametrize("length", [1, 5, 8, 13, 16, 37])
@pytest.mark.parametrize("attention", get_args(Attention))
def test_attention_needs_the_keys_that_each_query_sees(attention: Attention, length: int) -> None:
    config = replace(PRESETS["tiny"], attention=attention, chunk_size=8)
    first = {
        "chunk": lambda i: i // 8 * 8, "sliding_chunk": lambda i: max(0, i // 8 - 1) * 8,
        "sliding_window": lambda i: max(0, i - 7),
    }[attention]  # fmt: skip
    keys = sum(i + 1 - first(i) for i in range(length)) / length
    one_key = 6 * config.num_layers * (config.key_dim + config.value_dim)
    alone = flops_per_token(replace(config, attention="chunk", chunk_size=1), length)
    assert flops_per_token(config, length) - alone == pytest.approx(one_key * (keys - 1))


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
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"gecko-lm\[wandb\]"):
        MetricsWriter(tmp_path, None, "project")
