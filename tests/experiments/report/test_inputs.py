"""Inputs of a report: which are read, which are refused, and which are left out with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gecko.experiments.inputs import gather

Copy = Callable[[str, int], Path]


def test_runs_and_comparisons_bring_what_is_in_them_and_nothing_is_read_twice(runs: Path) -> None:
    seed = runs / "small_gecko" / "seed-0"
    inputs = gather([seed, seed / "eval" / "perplexity.json", seed])
    assert len(inputs.runs) == 1 and len(inputs.evaluations) == 2
    assert [what for _, what in inputs.given] == [
        "run, finished, 2 evaluations in its eval/", "evaluation, given before", "run, given before",
    ]  # fmt: skip
    assert inputs.runs[0].sessions[0]["parameters"] == 10_744 and inputs.left_out == []
    inputs = gather([runs])
    assert len(inputs.runs) == 4 and any("comparison is not finished" in why for _, why in inputs.left_out)


FORMAT = "gecko-evaluation-1"
POETRY = {key: {} for key in ("model", "command", "seed", "settings", "scores", "details")} | {"evaluation": "poetry"}


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        (None, None, ValueError, "got none"),
        ("gone", None, FileNotFoundError, "there is no"),
        ("empty/", None, ValueError, "it holds nothing"),
        ("text.txt", "no", ValueError, "must hold a result of `gecko eval` as JSON"),
        ("other.json", {"loss": 1}, ValueError, "must be a result file of `gecko eval`"),
        ("list.json", [1], ValueError, "got a list"),
        ("new.json", {**POETRY, "format": FORMAT}, ValueError, "'poetry'; known are perplexity"),
        ("cut.json", {"format": FORMAT, "evaluation": "academic"}, ValueError, "it lacks model, command"),
        ("run/recipe.json", {"model": {}}, ValueError, "give the folder"),
        ("run/", {"recipe.json": {"model": {}}}, ValueError, "it lacks data, batch_size"),
        ("run/", {"comparison.json": {}}, ValueError, "must be of `gecko compare`"),
        ("run/", {"comparison.json": {"format": "gecko-comparison-1"}}, ValueError, "lacks recipes"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(name: str | None, content: object, kind: type, message: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "")
    if name and name.endswith("/"):
        path.mkdir()
        for file, values in content.items() if isinstance(content, dict) else ():
            (path / file).write_text(json.dumps(values))
    elif content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(kind, match=message):
        gather([path] if name else [])


def test_a_run_is_shown_as_far_as_it_went_and_one_without_anything_is_left_out(copied: Copy, runs: Path) -> None:
    folder = copied("small_gecko", 0)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:6]) + '\n{"cut')
    assert gather([folder]).given[0][1] == "run, not finished: 4 of 12 steps, 0 evaluations in its eval/"
    (folder / "metrics.jsonl").unlink()
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
