"""Half an hour of a card: three commands with enough time each, whose results add up, and nothing that does not fit."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import operators
import pytest
import torch
from gpu.decoding import bytes_of_states
from gpu.page import page
from gpu.parts import WIDE, full
from gpu.record import Record
from gpu.suites import ROOT, Tested, run_tests
from gpu.timing import Bench
from gpu.training import count

from gecko.config import GeckoConfig
from gecko.state import GeckoState

PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
CARD = Bench(torch.device("cpu"), torch.bfloat16, 2, 1)


def commands() -> list[list[str]]:
    """Return the parts of each command in "Half an hour of a card"."""
    text = PAGE[PAGE.index("### Half an hour of a card") : PAGE.index("### Budget of the kernels")]
    lines = [line for line in text.splitlines() if "benchmarks/operators.py" in line]
    words = [shlex.split(line.partition("--only")[2].partition("--minutes")[0]) for line in lines]
    assert all("--earlier benchmarks/results" in line and '--out "$OUT"' in line for line in lines)
    return words


def test_three_commands_measure_in_the_planned_order_and_one_more_needs_a_larger_card():
    *three, larger = commands()
    assert len(three) == 3
    order = list(full())
    assert [name for parts in three for name in parts] == [x for x in order if any(x in parts for parts in three)]
    assert all(full()[name].needs for name in larger)
    assert {name for name, part in full().items() if part.needs} == set(larger)
    for part in ("rates", "tests:sizes", "tests:models", "operators:gecko-7b", "operators:gecko-1b"):
        assert part in three[0]


def test_each_command_is_planned_within_ten_minutes():
    rows = re.findall(r"^\| ([123]) \| `([\w:-]+)` \| ([\d,]+) \|", PAGE, re.MULTILINE)
    for number, parts in enumerate(commands()[:3], 1):
        planned_seconds = {part: int(seconds.replace(",", "")) for of, part, seconds in rows if int(of) == number}
        assert list(planned_seconds) == parts
        assert sum(planned_seconds.values()) <= 540


def test_decoding_many_rows_needs_their_states_and_the_weights():
    config = GeckoConfig.preset("gecko-7b")
    state = GeckoState.empty(config, 32, value_dtype=torch.bfloat16, device="meta")
    held = sum(x.nbytes for x in state.tensors().values())
    assert held + 2 * count(config) == pytest.approx(WIDE, rel=0.01) and bytes_of_states(state) < held


def test_a_part_that_does_not_fit_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "memory", 85e9)
    monkeypatch.setattr("operators.Runner.run", lambda self, part: self.record.begin(part, self.order))
    record = described(tmp_path / "card.json")
    operators.measure_all(["rates", "decoding:gecko-7b:wide"], full(), CARD, record, 1.0)
    assert record.parts() == {"rates": "", "decoding:gecko-7b:wide": "needs a card with 129 GB; this one has 85 GB"}
    assert "| decoding:gecko-7b:wide | not measured: needs a card with 129 GB" in "\n".join(page(record))


def described(path: Path, command: str = "first", **facts: object) -> Record:
    record = Record(path)
    given = {"hardware": "Card; 16 cores; PyTorch 2", "dtype": "bfloat16", "repeats": 20, "warm_ups": 5} | facts
    record.describe(command, **given)
    return record


def measured(record: Record, part: str, message: str) -> None:
    record.begin(part, [part, *record.parts()])
    record.begin_task(part, "task")
    record.add(part, "task", Tested("file", "test", "passed", 1.0, message))
    record.end_task(part, "task", "")


def test_a_command_takes_over_what_earlier_ones_measured(tmp_path):
    (tmp_path / "out").mkdir()
    earlier = described(tmp_path / "card.json")
    measured(earlier, "both", "old")
    measured(earlier, "one", "kept")
    later = described(tmp_path / "out/card.json", "second", hardware="Card; 8 cores; PyTorch 2")
    measured(later, "both", "new")
    operators.take_over_earlier(tmp_path, later)
    assert [x.message for x in later.results(Tested)] == ["kept", "new"]
    assert later.fact("commands") == ["first", "second"] and later.fact("hardware") == "Card; 8 cores; PyTorch 2"
    operators.take_over_earlier(tmp_path / "nothing", later)
    operators.take_over_earlier(None, later)


@pytest.mark.parametrize("facts", [{"hardware": "Card; 16 cores; PyTorch 3"}, {"repeats": 2}])
def test_results_of_other_software_or_settings_are_not_taken_over(tmp_path, facts):
    described(tmp_path / "card.json")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="same card, software and settings"):
        operators.take_over_earlier(tmp_path, described(tmp_path / "out/card.json", **facts))


def test_each_test_is_a_result(tmp_path):
    file = tmp_path / "test_two.py"
    file.write_text("def test_right(): pass\n\ndef test_wrong():\n    assert 'a | b' == ''\n")
    bench = replace(CARD, compilations=Record(tmp_path / "card.json").compilations)
    found = {x.test: x for x in run_tests(str(file), bench)}
    assert {name: x.outcome for name, x in found.items()} == {"test_right": "passed", "test_wrong": "failed"}
    assert found["test_wrong"].message


def test_an_error_of_pytest_is_no_result(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 4\n")
    python.chmod(0o755)
    monkeypatch.setattr("gpu.suites.sys.executable", str(python))
    with pytest.raises(RuntimeError, match="ended with 4"):
        list(run_tests("test_sizes.py", CARD))
