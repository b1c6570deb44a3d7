"""The first table of docs/evidence.md, the pages beside the results and the pictures show the result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace

import capacity
import diagnostics
import evidence
import kept
import ladder
import long_context
import memory_forms
import numpy as np
import order_by_size
import pictures
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
    assert kept.names("b") == ["b/one"] and kept.names("a") == ["a/two"]
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


def test_the_results_are_small() -> None:
    files = kept.FOLDER.parent.rglob("*")
    assert sum(path.stat().st_size for path in files if path.is_file()) <= 300_000


def test_the_table_has_the_numbers_of_the_files() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    for begin, shown, end in evidence.marked():
        assert begin + shown + end in page, "run: python benchmarks/evidence.py --write"


def add(name: str, seed: int, test: float, tuning: float = 1.0, source: str = "a", processor: str = "x") -> None:
    """Add a run to the ladder's table."""
    losses, rate = [test] * len(ladder.TEST), f"{ladder.MODELS[name].rate:g}"
    tables.Table("ladder.csv", ladder.COLUMNS).add([(name, seed, rate, 9, *losses, tuning, "c", source, processor)])


def test_the_order_is_judged_by_all_runs(results: Path) -> None:
    """Six pairs of runs that agree are enough for the sign test, and five are not; either sign is told."""
    assert ladder.signs() == (0, 0, 1.0) and evidence.signs()[2] == "open: 0 pairs are too few"
    for gecko, verdict in ((1.0, "holds"), (2.0, "does not hold")):
        for pairs in range(1, 7):
            add(ladder.GATED, pairs, 1.5)
            add(ladder.GECKO, pairs, gecko)
            ahead = pairs if gecko == 1.0 else 0
            assert ladder.signs() == (ahead, pairs, pytest.approx(2 ** (1 - pairs)))
            _, text, found = evidence.signs()
            assert found == (verdict if pairs == 6 else f"open: {pairs} pairs are too few")
            assert text.endswith("so they cannot decide") is (pairs < 6)
        (results / "ladder.csv").unlink()


def test_runs_of_one_processor_are_compared_and_a_seed_counts_once(results: Path) -> None:
    for seed, processor, gated, gecko in ((0, "x", 1.5, 1.4), (0, "y", 1.9, 1.6), (1, "x", 1.6, 1.4)):
        add(ladder.GATED, seed, gated, processor=processor)
        add(ladder.GECKO, seed, gecko, processor=processor)
    add(ladder.GATED, 2, 9.0, processor="x")
    add(ladder.GECKO, 2, 1.0, processor="y")
    found = ladder.contrast(ladder.GATED, ladder.GECKO)
    assert found is not None and found.seeds == 2 and found.change.mean == pytest.approx(0.2)
    assert found.change.low == pytest.approx(0.2), "both seeds have the same mean"
    assert ladder.signs()[:2] == (2, 2)


def test_a_baseline_is_chosen_by_the_tuning_novels_and_by_equal_seeds(results: Path) -> None:
    """The least mean would be of one lucky seed, and the least test loss of the model that the tuning novels reject."""
    names, gecko = ladder.BASELINES[ladder.LLAMA, "1 M"]
    assert evidence.ahead(ladder.LLAMA, "1 M")[1:] == ("not run", "open") and ladder.tuned(names) is None
    assert ladder.missing(names, gecko) == 11, "a seed of eight settings, three of Gecko"
    chosen, near = names[6], names[7]
    assert [ladder.MODELS[name].rate for name in (chosen, near)] == [4e-3, 2e-3]
    for name in names:
        losses = {chosen: 1.6, near: 1.6 + 0.9 * ladder.MARGIN}
        add(name, 0, 1.5 if name == names[1] else 1.9, losses.get(name, 1.7))
    add(names[2], 1, 1.9, 0.5, processor="z")
    for seed in range(3):
        add(gecko, seed, 1.3)
    assert ladder.contenders(names) == [chosen, near]
    assert evidence.ahead(ladder.LLAMA, "1 M")[2] == "open: 4 or more runs are missing"
    for seed in (1, 2):
        add(chosen, seed, 1.9, 1.6)
        assert evidence.ahead(ladder.LLAMA, "1 M")[2].startswith("open"), "the one within the margin lacks seeds"
        add(near, seed, 1.9, 1.6 + 0.9 * ladder.MARGIN)
    _, text, verdict = evidence.ahead(ladder.LLAMA, "1 M")
    assert verdict == "holds" and f"at “{chosen}”, the best of 8 of 8 settings run" in text
    assert "by seeds 0, 1, 2; its rate, 0.004, is inside those run" in text
    assert text.startswith("+0.6000 [+0.6000, +0.6000]: ") and "different code" not in text


def test_settings_are_compared_by_the_runs_that_two_of_them_have(results: Path) -> None:
    """Two of the four rates ran on one processor each, so no run is common to all."""
    names, gecko = ladder.BASELINES[ladder.MEGALODON, "4 M"]
    middle, best, low, high = names
    for seed in range(2):
        add(gecko, seed, 1.3)
        for name, loss in ((middle, 1.3), (best, 1.2)):
            add(name, seed, 1.5, loss, processor="x")
    add(middle, 0, 1.5, 1.1, processor="y")  # other numbers, which are not those of x
    add(best, 0, 1.5, 1.0, processor="y")
    add(low, 0, 1.5, 1.25, processor="x")
    assert ladder.contenders(names) == [best] and ladder.missing(names, gecko) == 1
    add(high, 0, 1.5, 1.0 + 0.9 * ladder.MARGIN, processor="y")
    assert ladder.contenders(names) == [best, high] and ladder.missing(names, gecko) == 1, "the second seed of one"


def test_settings_of_different_processors_are_compared_by_their_differences_from_gecko(results: Path) -> None:
    """The processor whose losses are all lower does not decide."""
    one, other, third, *_ = ladder.BASELINES[ladder.LLAMA, "4 M"][0]
    for processor, level in (("x", 1.0), ("y", 2.0)):
        add(ladder.GECKO_4M, 0, 1.3, level, processor=processor)
    add(one, 0, 1.5, 1.2, processor="x")
    add(other, 0, 1.5, 2.1, processor="y")
    assert ladder.contenders([one, other]) == [other]
    add(third, 0, 1.5, 0.1, processor="z")  # beside no Gecko
    assert ladder.contenders([one, other, third]) == [other, third]
    add(one, 0, 1.5, 2.0, processor="y")
    assert ladder.contenders([one, other]) == [one], "by the runs that both have"


def test_no_verdict_at_an_end_of_the_rates_nor_of_a_run_that_diverged(results: Path) -> None:
    """What held by the rule before stays told, and pairs of different code are marked."""
    tuning = {ladder.GATED: 1.1, ladder.SLOWER: 1.2, ladder.FASTER: 1.0}
    for seed in range(3):
        add(ladder.GECKO, seed, 1.3)
        for name, loss in tuning.items():
            add(name, seed, 1.5, loss, "b" if seed == 2 else "a")
    _, text, verdict = evidence.ahead(ladder.MEGALODON, "1 M")
    assert verdict == "open: the chosen rate is the upper end; by the earlier rule: holds"
    assert text.endswith("; pairs of different code")
    (results / "ladder.csv").unlink()
    for seed in range(3):
        add(ladder.GECKO, seed, float("nan") if seed else 1.3)
        for name, loss in {**tuning, ladder.FASTER: float("nan")}.items():
            add(name, seed, 1.5, loss)
    _, text, verdict = evidence.ahead(ladder.MEGALODON, "1 M")
    assert ladder.tuned(tuning) == ladder.GATED and ladder.missing([*tuning], ladder.GECKO) == 0
    assert text.startswith("diverged: ") and verdict.startswith("open: a run diverged")


def test_an_interval_has_the_variance_of_seeds_and_of_documents() -> None:
    assert tables.over_seeds_and_documents([[1.0, 2.0]]).shown() == "+1.5000 (one seed: no interval)"
    differences = np.array([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    mean, low, high = tables.over_seeds_and_documents(differences)
    # Both variances of the mean are 1/3: by Satterthwaite 4 degrees of freedom, t = 2.7764.
    alone = 4.30265 * 3**-0.5
    assert mean == 2 and high - mean == pytest.approx(max(2.77645 * (2 / 3) ** 0.5, alone), abs=1e-4)
    assert mean - low == pytest.approx(high - mean)
    wide = tables.over_seeds_and_documents(np.add.outer(np.arange(8.0), np.arange(8.0)))
    assert wide.high - wide.mean == pytest.approx(2.14479 * (2 * 6 / 8) ** 0.5, abs=1e-4), "wider than either alone"


def test_a_run_that_fails_costs_no_other(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    begun = list[str]()

    def run(one: SimpleNamespace) -> list[tuple[str, ...]]:
        begun.append(one.key[0])
        if one.key[0] in bad:
            raise bad[one.key[0]]
        return [(*one.key, "1")] * one.lines

    runs, bad = [SimpleNamespace(key=(name,), lines=2) for name in "abcd"], {"b": OSError("full")}
    table = tables.Table("x.csv", ("name", "value"))
    with pytest.raises(ExceptionGroup, match="1 runs failed") as failed:
        table.work_through([lambda: runs[:2], lambda: runs[2:]], run, 1)
    assert failed.group_contains(OSError, match="full")
    assert [row["name"] for row in tables.rows_of("x.csv")] == ["a", "a", "c", "c", "d", "d"]
    (results / "x.csv").write_text("name,value\na,1\na,1\nb,1\n")
    begun.clear()
    bad = {}
    table.work_through([lambda: runs[:2]], run, 1)
    assert begun == ["b"], "it lacks a line"
    with pytest.raises(ValueError, match="must have the columns name, other; it has name, value"):
        tables.Table("x.csv", ("name", "other"))


def test_packed_lines_come_before_those_of_later_runs(results: Path) -> None:
    for value in range(3):
        tables.Table("x.csv", ("name", "value")).add([("a, b", value)])
        tables.pack()
        assert [path.name for path in results.iterdir()] == ["x.csv.xz"]
    tables.Table("x.csv", ("name", "value")).add([("c", 3)])
    assert [(row["name"], row["value"]) for row in tables.rows_of("x.csv")] == [
        *(("a, b", str(value)) for value in range(3)), ("c", "3")
    ]  # fmt: skip
    later = (results / "x.csv").read_bytes()
    tables.pack()
    (results / "x.csv").write_bytes(later)  # as after a kill between the two files
    tables.pack()
    assert len(tables.rows_of("x.csv")) == 4
    with pytest.raises(ValueError, match="must have the columns name, other; it has name, value"):
        tables.Table("x.csv", ("name", "other"))


def test_ctrl_c_gives_up_runs_that_have_not_begun(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    ended, begun = Event(), list[str]()

    def stopped(_: object) -> Iterator[object]:
        ended.set()
        raise KeyboardInterrupt
        yield

    def run(one: SimpleNamespace) -> list[tuple[str, ...]]:
        begun.append(one.key[0])
        ended.wait(10)
        return [one.key]

    monkeypatch.setattr(tables, "as_completed", stopped)
    runs = [SimpleNamespace(key=(name,), lines=1) for name in "abcdefgh"]
    with pytest.raises(KeyboardInterrupt):
        tables.Table("x.csv", ("name",)).work_through([lambda: runs], run, 1)
    assert len(begun) < len(runs)


def test_a_llama_can_start_with_the_weights_of_a_gecko() -> None:
    llama = ladder.llama_like_gecko("compare_llama", 3)
    wide = {name: float(x.std()) * x.shape[1] ** 0.5 for name, x in llama.state_dict().items() if x.ndim == 2}
    ends = {name for name in wide if "layers" not in name}
    assert ends == {"model.embed_tokens.weight", "lm_head.weight"} and len(wide) == 5 * 7 + 2
    assert all(wide[name] == pytest.approx(1 if name in ends else 3**-0.5, rel=0.03) for name in wide)
    again = ladder.llama_like_gecko("compare_llama", 3).state_dict()
    assert all((x == again[name]).all() for name, x in llama.state_dict().items())


def test_code_is_changed_by_files_of_src_and_benchmarks_and_not_by_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables.gecko, "__file__", str(tmp_path / "src/gecko.py"))
    monkeypatch.setattr(tables, "code_version", lambda: {"version": "1", "commit": "abcdef0123-dirty"})
    files = [tmp_path / name for name in ("src/gecko.py", "benchmarks/ladder.py", "benchmarks/results/x.csv", "docs")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        tables.git(*command)
    tree = tables.git("rev-parse", "--short=7", "HEAD:src")
    for file, mark in zip(files, ("-dirty", "-dirty", "", ""), strict=True):
        file.write_text("new\n")
        assert len(tree) == 7 and tables.code() == (f"abcdef0{mark}", tree + mark)
        file.write_text("old\n")
    monkeypatch.setattr(tables.gecko, "__file__", str(tmp_path.parent / "other/gecko.py"))
    assert tables.code()[0] == "abcdef0-dirty", "the package of another place"


def test_a_run_that_goes_on_names_the_code_of_all_its_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(finished=len(sessions) == 3, checkpoint=tmp_path)

    monkeypatch.setattr(tables, "train", stopped)
    sessions = list[str]()
    for commit in ("one", "two", "two"):
        sessions.append(commit)
        monkeypatch.setattr(tables, "CODE", (commit, "tree"))
        if len(sessions) < 3:
            with pytest.raises(InterruptedError):
                tables.trained("tiny", [], tmp_path / "run")
    assert tables.trained("tiny", [], tmp_path / "run")[1][:2] == ("one+two", "tree")


def test_no_kept_result_is_of_changed_code() -> None:
    names = "capacity.csv", "ladder.csv", "ladder_rates.csv", "past.csv"
    commits = [row["commit"] for name in names for row in tables.rows_of(name)]
    assert len(commits) > 40 and not [commit for commit in commits if "-" in commit]


@pytest.mark.parametrize("module", [retrieval, long_context, order_by_size, memory_forms, diagnostics])
def test_the_pages_have_the_numbers_of_the_files(module: ModuleType) -> None:
    assert (module.FOLDER / "README.md").read_text(encoding="utf-8") == module.page()


def test_the_line_is_a_power_law_through_the_means_of_sizes() -> None:
    points = [(size, 3 * size**-0.1 + error) for size in (10**6, 4 * 10**6, 15 * 10**6) for error in (-0.01, 0.01)]
    assert order_by_size.power_law(points) == pytest.approx((3, 0.1))
    assert order_by_size.power_law(points[:2]) is None


# ---- The pictures of docs/how_it_works.md and docs/evidence.md.


def test_the_pictures_are_what_the_script_draws() -> None:
    for draw in pictures.drawn():
        svg = (pictures.PICTURES / f"{draw.__name__}.svg").read_text(encoding="utf-8")
        assert svg == draw().svg(), "run: python benchmarks/pictures.py --write"


def test_forms_are_drawn_by_bytes_of_state(results: Path) -> None:
    assert pictures.memory_capacity not in pictures.drawn()
    assert pictures.ladder_changes().svg().count("not run") == len(ladder.RUNGS) - 1
    table = tables.Table("capacity.csv", capacity.COLUMNS)
    for form in (capacity.PAPER, capacity.LINEAR):
        for pairs, width in sorted(capacity.cells_of(form)):
            assert pictures.memory_capacity().svg().count(f">{form}<") == 0, "a form is drawn once all cells ran"
            recall = 0.25 if width == 16 else 1.0
            table.add([(*capacity.Cell(form, pairs, width, 0, 1e-2).key, recall, 1, 9, "abcdefg", "a", "x")])
    svg = pictures.memory_capacity().svg()
    assert pictures.memory_capacity in pictures.drawn() and svg.count(f">{capacity.LINEAR}<") == 1
    assert svg.count('points="70.0,232.5 196.7,60.0 ') == 2 and ">4K<" in svg and ">32K<" in svg
