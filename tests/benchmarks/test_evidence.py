"""The first table of docs/evidence.md and the pages beside the results have the numbers of the result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import diagnostics
import evidence
import kept
import ladder
import long_context
import memory_forms
import numpy as np
import order_by_size
import pytest
import retrieval
import tables
from support.results import CODE, HARDWARE, score, write_result


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep results in an empty folder."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    for cache in (kept._table, kept._scores):
        cache.cache_clear()
    yield tmp_path
    for cache in (kept._table, kept._scores):
        cache.cache_clear()


def test_a_kept_evaluation_is_what_was_written(empty: Path) -> None:
    path, blocks = empty / "result.json", "bootstrap over 32 blocks, 95 %"
    for value in (1.0, 2.5):  # the second replaces the first
        scores = [score("loss", value, 32, "blocks", {"context": 64, "mode": "2K"}, 0.25, blocks),
                  score("loss", value, 32, "tokens", {"context": 65, "mode": "2K"}, 0.25, blocks),
                  score("accuracy", 1 / 3, 3, "answers", {}, 0.1, "Wilson, 95 %")]  # fmt: skip
        settings, details = {"steps": 5, "config": {"a": 1}}, {"rows": [1.5, 2.0]}
        write_result(path, "x", scores, settings, {"name": "m"}, details, ["a note"])
        for name in ("b/one", "a/two"):
            kept.keep(name, path)
    record = kept.read("b/one")
    assert kept.names("b") == ["b/one"] and kept.has("a/two") and not kept.has("one")
    assert (record["model"], record["commit"], record["hardware"]) == ("m", CODE["commit"], HARDWARE)
    assert (record["settings"], record["notes"], record["rows"]) == ({"steps": 5}, ["a note"], [1.5, 2.0])
    first, second, share = record["scores"]
    assert first["where"] == {"context": 64, "mode": "2K"} and second["where"]["context"] == 65 and share["where"] == {}
    assert first["interval"] == {"low": 2.25, "high": 2.75, "method": blocks} and share["interval"] is None
    assert second["interval"]["method"] == blocks, "of other units than n"
    assert (first["value"], first["n"], round(share["value"] * share["n"])) == (2.5, 32, 1)
    write_result(path, "x", [score("loss", 1.0, 1, "blocks", {"mode": "a; b"})], {}, {"name": "m"})
    with pytest.raises(ValueError, match="must be without '; '"):
        kept.keep("b/three", path)
    kept._table.cache_clear()
    with pytest.raises(KeyError, match="must hold a result of the name b/three"):
        kept.read("b/three")


def test_a_kept_comparison_has_its_recipes_runs_and_curves(empty: Path) -> None:
    interval = {"low": 0.5, "high": 1.5, "method": "bootstrap over 1,024 held-out rows, 95 %"}
    recipes = [
        {"recipe": name, "seeds": [0], "nats_per_byte": 1.0, "interval": interval, "difference": difference,
         "difference_interval": difference and interval} for name, difference in (("a", None), ("b", 0.25))
    ]  # fmt: skip
    runs = [{"recipe": name, "seed": 0, "nats_per_byte": 1.0, "held_out_tokens": 9, "parameters": 7, "tokens": 4096,
             "tokens_per_second": 2.5, "curve": [{"step": 1, "tokens": 48, "seconds": 60.0, "nats_per_byte": None}]}
            for name in ("a", "b")]  # fmt: skip
    trial = {"recipe": "a", "learning_rate": 1e-2, "nats_per_byte": None}
    (empty / "comparison.json").write_text(json.dumps({
        **CODE, "command": "gecko compare a b --out x", "hardware": HARDWARE, "notes": [], "seeds": [0],
        "settings": {"precision": "float32", "steps": 9}, "recipes": recipes, "runs": runs,
        "tuning": {"trials": [trial]},
    }))  # fmt: skip
    kept.keep("c", empty / "comparison.json")
    record = kept.comparison("c")
    assert [(one["recipe"], one["difference"]) for one in record["recipes"]] == [("a", None), ("b", 0.25)]
    assert record["recipes"][1]["difference_interval"] == interval and record["parameters"] == {"a": 7, "b": 7}
    assert (record["command"], record["seeds"]) == ("gecko compare a b --out x", [0])
    point = record["runs"][0]["curve"][0]
    assert (point["tokens"], point["seconds"]) == (48, 60) and np.isnan(point["nats_per_byte"])


def test_the_tables_are_small() -> None:
    assert sum(path.stat().st_size for path in kept.FOLDER.glob("*.csv")) <= 300 * 1024


def test_the_table_has_the_numbers_of_the_files() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    for begin, shown, end in evidence.marked():
        assert begin + shown + end in page, "run: python benchmarks/evidence.py --write"


def test_the_order_is_judged_by_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pairs of runs that agree are enough for the sign test, and five are not; either sign is told."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert ladder.signs() == (0, 0, 1.0) and evidence.signs()[2] == "open: 0 pairs are too few"
    for gecko, verdict in ((1.0, "holds"), (2.0, "does not hold")):
        lines = [",".join(("rung", "seed", *ladder.TEST, "tuning_novels"))]
        for pairs in range(1, 7):
            for name, loss in ((ladder.GATED, 1.5), (ladder.GECKO, gecko)):
                lines.append(",".join((name, str(pairs), *(f"{loss + i}" for i in range(len(ladder.TEST))), "1.0")))
            (tmp_path / "ladder.csv").write_text("\n".join(lines) + "\n")
            ahead = pairs if gecko == 1.0 else 0
            assert ladder.signs() == (ahead, pairs, pytest.approx(2 ** (1 - pairs)))
            assert evidence.signs()[2] == (verdict if pairs == 6 else f"open: {pairs} pairs are too few")


def test_a_baseline_is_chosen_by_the_tuning_novels_and_by_equal_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least mean would be of one lucky seed, and the least test loss of the model that the tuning novels reject."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    names, gecko = ladder.BASELINES[ladder.LLAMA, "1 M"]
    claim = "With equal bytes Gecko is better than Llama 2 at its best rate and initialisation: 1 M parameters"
    assert evidence.ahead(ladder.LLAMA, "1 M") == (claim, "not run", "open")
    assert ladder.missing(names, gecko) == 11, "a seed of six settings, the two others of one of them, three of Gecko"
    lines = [",".join(("rung", "seed", *ladder.TEST, "tuning_novels"))]

    def add(name: str, seed: int, tuning: float, test: float) -> None:
        shown = f'"{name}"', str(seed), *(str(test) for _ in ladder.TEST), str(tuning)
        (tmp_path / "ladder.csv").write_text("\n".join([*lines, ",".join(shown)]) + "\n")
        lines.append(",".join(shown))

    for number, name in enumerate(names):
        add(name, 0, 1.6 + 0.1 * (number != 3), 1.5 if number == 4 else 1.9)
    add(names[2], 1, 0.5, 1.9)
    for seed in range(3):
        add(gecko, seed, 1.2, 1.3)
    assert ladder.tuned(names) == names[3]
    assert evidence.ahead(ladder.LLAMA, "1 M")[2] == "open: 2 or more runs are missing"
    for seed in (1, 2):
        add(names[3], seed, 1.6, 1.9)
    _, text, verdict = evidence.ahead(ladder.LLAMA, "1 M")
    assert verdict == "holds" and text.endswith(f"(“{names[3]}”, rate 0.008): +0.6000 [+0.6000, +0.6000]")


def test_a_llama_can_start_with_the_weights_of_a_gecko() -> None:
    llama = ladder.llama_like_gecko("compare_llama", 3)
    wide = {name: float(x.std()) * x.shape[1] ** 0.5 for name, x in llama.state_dict().items() if x.ndim == 2}
    ends = {name for name in wide if "layers" not in name}
    assert ends == {"model.embed_tokens.weight", "lm_head.weight"} and len(wide) == 5 * 7 + 2
    assert all(wide[name] == pytest.approx(1 if name in ends else 3**-0.5, rel=0.03) for name in wide)
    again = ladder.llama_like_gecko("compare_llama", 3).state_dict()
    assert all((x == again[name]).all() for name, x in llama.state_dict().items())


def test_no_kept_result_is_of_changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, shown in (("abcdef0123-dirty", "abcdef0-dirty"), ("abcdef0123", "abcdef0")):
        monkeypatch.setattr(tables, "code_version", lambda commit=commit: {"version": "1", "commit": commit})
        assert tables.code_and_machine()[0] == shown
    names = [path.name for path in tables.RESULTS.glob("*.csv") if path.name != "results.csv"]
    commits = [row["commit"] for name in names for row in tables.rows_of(name)]
    assert len(commits) > 40 and not [commit for commit in commits if "-" in commit]


@pytest.mark.parametrize("module", [retrieval, long_context, order_by_size, memory_forms, diagnostics])
def test_the_pages_have_the_numbers_of_the_files(module: ModuleType) -> None:
    assert (module.FOLDER / "README.md").read_text(encoding="utf-8") == module.page()


def test_the_line_is_a_power_law_through_the_means_of_sizes() -> None:
    points = [(size, 3 * size**-0.1 + error) for size in (10**6, 4 * 10**6, 15 * 10**6) for error in (-0.01, 0.01)]
    assert order_by_size.power_law(points) == pytest.approx((3, 0.1))
    assert order_by_size.power_law(points[:2]) is None
