"""Inputs of a report: which are read, which are refused, and which are left out with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gecko.experiments.inputs import gather

Copy = Callable[[str, int], Path]


def test_runs_bring_their_evaluations_and_nothing_is_read_twice(runs: Path) -> None:
    seed = runs / "small_gecko" / "seed-0"
    inputs = gather([seed, seed / "eval" / "perplexity.json", seed])
    assert len(inputs.runs) == 1 and len(inputs.evaluations) == 2
    assert [what for _, what in inputs.given] == [
        "run, finished, 2 evaluations in its eval/", "evaluation, given before", "run, given before",
    ]  # fmt: skip
    assert inputs.runs[0].sessions[0]["parameters"] == 10_744 and inputs.left_out == []


def test_folders_of_comparisons_bring_all_seeds(runs: Path) -> None:
    inputs = gather([runs])
    assert len(inputs.runs) == 4
    assert any("comparison is not finished" in why for _, why in inputs.left_out)


def test_bad_input_is_refused(tmp_path: Path, runs: Path, results: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no")
    (tmp_path / "other.json").write_text('{"loss": 1}')
    (tmp_path / "list.json").write_text("[1]")
    record = json.loads((results / "piqa.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps(record | {"evaluation": "poetry"}))
    (tmp_path / "cut.json").write_text(json.dumps({name: record[name] for name in ("format", "evaluation")}))
    (tmp_path / "norun").mkdir()
    (tmp_path / "norun" / "recipe.json").write_text('{"model": {}}')
    cases = [
        (None, ValueError, "got none"),
        (tmp_path / "gone", FileNotFoundError, "there is no"),
        (tmp_path / "empty", ValueError, "it holds nothing"),
        (tmp_path / "text.txt", ValueError, "must hold a result of `gecko eval` as JSON"),
        (tmp_path / "other.json", ValueError, "must be a result file of `gecko eval`"),
        (tmp_path / "list.json", ValueError, "got a list"),
        (tmp_path / "new.json", ValueError, "'poetry'; known are perplexity"),
        (tmp_path / "cut.json", ValueError, "it lacks model, command"),
        (tmp_path / "norun", ValueError, "it lacks data, batch_size"),
        (runs / "small_gecko" / "seed-0" / "recipe.json", ValueError, "give the folder"),
    ]  # fmt: skip
    for path, kind, message in cases:
        with pytest.raises(kind, match=message):
            gather([] if path is None else [path])


def test_a_run_without_results_is_shown_as_far_as_it_went(copied: Copy) -> None:
    folder = copied("small_gecko", 0)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:6]) + '\n{"cut')
    inputs = gather([folder])
    assert inputs.given[0][1] == "run, not finished: 4 of 12 steps, 0 evaluations in its eval/"


def test_a_run_without_anything_is_left_out_and_alone_is_an_error(copied: Copy, runs: Path) -> None:
    folder = copied("small_gecko", 0)
    (folder / "metrics.jsonl").unlink()
    (folder / "results.json").unlink()
    with pytest.raises(ValueError, match="never trained"):
        gather([folder])
    inputs = gather([folder, runs / "small_chunk" / "seed-0"])
    assert len(inputs.runs) == 1 and inputs.left_out[0][0] == str(folder)


def test_a_bad_file_that_nobody_named_is_left_out(copied: Copy) -> None:
    folder = copied("small_gecko", 0)
    (folder / "eval").mkdir()
    (folder / "eval" / "notes.json").write_text("{}")
    inputs = gather([folder])
    assert len(inputs.runs) == 1 and "must be a result file" in inputs.left_out[0][1]
