"""All tables and captions of reports and comparisons, and which scores are shown together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.results import CODE, HARDWARE, MODELS, PARAMETERS, SEEDS, as_csv, score, small_run, write_result, write_run

from gecko.eval.diagnose import PIECE
from gecko.eval.retrieval import READERS
from gecko.eval.retrieval import TASKS as RETRIEVAL
from gecko.eval.synthetic import TASKS as SYNTHETIC
from gecko.experiments.compare import results as compared
from gecko.experiments.compare.plan import Planned
from gecko.experiments.inputs import EvaluationFile, Inputs, gather
from gecko.experiments.report import build_sections, reproduction
from gecko.pages import Section, Table

GOLDEN = Path(__file__).parents[1] / "golden"
Copy = Callable[[str, int], Path]


def agrees(name: str, found: str) -> None:
    assert found == (GOLDEN / name).read_text(encoding="utf-8")


def everything(inputs: Inputs) -> str:
    sections = build_sections(inputs)
    ends = [Section("Inputs", tables=[Table("given", (), inputs.given), Table("left out", (), inputs.left_out)]),
            Section("Reproduction", texts=reproduction(inputs))]  # fmt: skip
    return as_csv([*sections, *ends])


def test_report_of_runs_and_evaluations(inputs: list[Path]) -> None:
    agrees("report.csv", everything(gather(inputs)).replace(f"{inputs[0].parents[2]}/", ""))


def comparison(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the values of a comparison, with tuning, an unfinished run and a note."""
    names = tuple(reversed(MODELS))
    runs = {(name, seed): folder / name / f"seed-{seed}" for seed in seeds for name in names}
    planned = [Planned(name, f"seed-{seed}", write_run(path, name, seed)) for (name, seed), path in runs.items()]
    found = [result for one in planned if (result := compared.RunResult.of(one, PARAMETERS[one.recipe])) is not None]
    trials = [{"recipe": name, "learning_rate": 1e-2, "state": "finished", "nats_per_byte": 4.25, "tokens": 99}
              for name in names]  # fmt: skip
    trials.append({"recipe": names[0], "learning_rate": 2e-2, "state": "diverged", "nats_per_byte": None, "tokens": 0})
    return {
        "format": "gecko-comparison-1", **CODE, "command": "gecko compare …", "hardware": HARDWARE, "first": names[0],
        "unit": "held-out nats a byte", "seeds": list(seeds),
        "settings": {"steps": 12, "data.source": "texts", "data.tokenizer": "bytes", "data.validation": "others"},
        "parameters": {name: PARAMETERS[name] for name in names}, "models": {name: {"layers": 1} for name in names},
        "tuning": {"learning_rates": [1e-2, 2e-2], "steps": 4, "trials": trials, "chosen": dict.fromkeys(names, 1e-2)},
        "recipes": compared.summarise(found, names[0]), "runs": [result.values for result in found],
        "unfinished": {"small_chunk seed-2": "failed"}, "notes": ["a note"],
    }  # fmt: skip


@pytest.mark.parametrize("seeds", [(0,), SEEDS])
def test_page_and_report_of_a_comparison(
    tmp_path: Path, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, shown = comparison(tmp_path / "runs", seeds), []
    monkeypatch.setattr(compared, "write_html", lambda *page: shown.append(page))
    monkeypatch.setattr(compared, "code_version", lambda: CODE)
    compared.write_page(tmp_path, values)
    (_, title, summary, sections) = shown[0]
    agrees(f"comparison-{len(seeds)}.csv", f"{title}\n{summary}\n{as_csv(sections)}")
    if len(seeds) > 1:
        compared.save(tmp_path / "runs", values)
        agrees("folder.csv", everything(gather([tmp_path / "runs"])).replace(f"{tmp_path}/", ""))


def sections(inputs: Inputs | Sequence[EvaluationFile]) -> dict[str, Section]:
    inputs = inputs if isinstance(inputs, Inputs) else Inputs(evaluations=list(inputs))
    return {section.title: section for section in build_sections(inputs)}


def cells(section: Section, table: int = 0) -> list[list[str]]:
    return [[cell if isinstance(cell, str) else cell[0] for cell in row] for row in section.tables[table].rows]


@pytest.fixture
def file(inputs: list[Path]) -> Callable[[str], EvaluationFile]:
    """Return a function from a name to a result file that was written."""
    by_name = {path.name: path for path in [*inputs, *inputs[2].glob("eval/*.json")]}
    return lambda name: gather([by_name[name]]).evaluations[0]


def changed(file: EvaluationFile, name: str, seed: int = 0, **values: Any) -> EvaluationFile:
    """Return a result file of another model, with other ``values``."""
    record = copy.deepcopy(dict(file.record))
    record["model"] |= {"name": f"{name}/seed-{seed}"}
    for key, value in values.items():
        record["model" if key == "tokenizer" else "settings"][key] = value
    return EvaluationFile(Path(f"{name}-{seed}.json"), record)


def test_perplexities_of_other_tokenizers_and_texts_are_drawn_apart(file: Any) -> None:
    of, title = file("perplexity.json"), "Perplexity by context length"
    for change in ({"tokenizer": "olmo.json"}, {"texts": ["another.txt"]}):
        apart = sections([of, changed(of, "b", **change)])[title]
        assert len(apart.pictures) == 2 and "have their own pictures" in apart.intro
    texts = [f"/elsewhere/{Path(text).name}" for text in of.record["settings"]["texts"]]
    assert len(sections([of, changed(of, "b"), changed(of, "c", texts=texts)])[title].pictures) == 1
    inputs = Inputs(evaluations=[changed(of, "a"), EvaluationFile(Path("again.json"), changed(of, "a").record)])
    assert len(sections(inputs)[title].tables[0].columns) == 3, "the same score twice is shown once"
    assert inputs.left_out == [("again.json", "perplexity: some scores are of a model and seed shown already")]
    record, kinds = copy.deepcopy(dict(of.record)), ("all that was read", "last 6 chunks")
    record["scores"] = [score | {"where": {"norm statistics of": kind, **score["where"]}}
                        for kind in kinds for score in record["scores"]]  # fmt: skip
    record["details"] = {kind: record["details"] for kind in kinds}
    found = sections([EvaluationFile(Path("r.json"), record, of.run)])[title]
    first, second = (column[0] for column in found.tables[0].columns[2:])
    assert second == f"{first}, norms of the last 6 chunks", "renewed norms are another line"


def test_every_task_can_be_shown(tmp_path: Path) -> None:
    """Of tasks that were added after the report, and of a Llama, whose config has no chunks."""
    for task in RETRIEVAL:
        name = "string_match_part" if task in READERS else "string_match_all"
        scores = [score(name, 0.5, 20, "samples", {"task": task, "length": 900, "depth": "random"}, 0.1, "Wilson")]
        settings = {"task": task, "texts": ["essays.txt"], "lengths": [900], "depths": "random", "samples": 20}
        write_result(tmp_path / f"{task}.json", "retrieval", scores, settings, {"name": "m"}, {"words": 9})
    for task in SYNTHETIC:
        for kind, config in enumerate(({"chunk_size": PIECE}, {"rope_base": 1.0})):
            settings = {"task": task, "size": {"length": 32, "vocab_size": 16, "items": 2}, "steps": 200,
                        "guessing": 0.125, "config": config}  # fmt: skip
            scores = [score("accuracy", 0.5, 20, "answers", {"chunks before the question": place}, 0.1, "Wilson")
                      for place in ("any", 0, 1)]  # fmt: skip
            write_result(tmp_path / f"{task}-{kind}.json", "diagnose", scores, settings, {"name": "m"})
    found = sections(gather(sorted(tmp_path.glob("*.json"))))
    for task in RETRIEVAL:
        (one,) = (part for title, part in found.items() if any(task in table.title for table in part.tables))
        assert len(one.pictures) == 1 and one.tables[0].rows[0][3][0] == "50.0", task
    synthetic = found["Synthetic tasks"]
    assert len(synthetic.pictures) == len(SYNTHETIC) and all(len(table.columns) == 3 for table in synthetic.tables)


@pytest.mark.parametrize(("name", "scale"), [("piqa.json", 1), ("story.json", 100), ("passkey.json", 1)])
def test_shares_over_seeds_stay_within_0_and_100_percent(file: Any, name: str, scale: int) -> None:
    files = [changed(file(name), "a", seed) for seed in range(3)]
    for one, value in zip(files, (0.9, 1.0, 1.0), strict=True):
        one.record["scores"][0]["value"] = value * scale
    (section,) = sections(files).values()
    assert section.tables[0].rows[0][3][1].startswith("82.3 to 100.0; ")
    assert "cut at 0 and 100 %" in section.tables[0].notes[0]


def test_needles_in_other_texts_are_drawn_apart(file: Any) -> None:
    names = ("emma.txt", "x/emma.txt", "walden.txt")
    of, task = file("passkey.json"), "niah_single_2"
    inputs = Inputs(evaluations=[changed(of, "a", task=task, texts=[name]) for name in names])
    found = sections(inputs)["Retrieval: needle in texts"]
    assert [table.title for table in found.tables[:2]] == [
        "Needle in texts (niah_single_2), in emma.txt", "Needle in texts (niah_single_2), in walden.txt",
    ]  # fmt: skip
    assert [picture.caption for picture in found.pictures] == ["a, in emma.txt", "a, in walden.txt"]
    assert len(inputs.left_out) == 1, "the same book from another folder is the same"


@pytest.mark.parametrize("name", ["story.json", "piqa.json"])
def test_tasks_on_other_data_are_other_rows(file: Any, name: str) -> None:
    changes = ({}, {"data": "other.jsonl"}, {"limit": 5}, {"shots_data": "train.jsonl"}, {"new_tokens": 9})
    inputs = Inputs(evaluations=[changed(file(name), "a", **change) for change in changes])
    (section,) = sections(inputs).values()
    assert len(cells(section)) == len(changes) and not inputs.left_out
    words = ("", "other.jsonl", "first 5", "shots of train.jsonl", "of 9 tokens")
    assert all(said in row[1] for row, said in zip(cells(section), words, strict=True))


def test_a_seed_trained_twice_is_left_out_and_an_unfinished_one_is_told(runs: Path, copied: Copy) -> None:
    folder = copied("small_gecko", 0)
    inputs = gather([runs / "small_gecko/seed-0", folder])
    assert cells(sections(inputs)["Training"])[0][:2] == ["small_gecko", "0"]
    assert inputs.left_out[0][0] == str(folder) and "with the same seed" in inputs.left_out[0][1]
    folder = copied("small_gecko", 1)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")
    table = sections(gather([runs / "small_gecko/seed-0", folder]))["Training"].tables[0]
    assert [row[1] for row in table.rows] == ["0", ("not finished", "seed 1: 3 steps")]
    (folder / "metrics.jsonl").write_text(lines[1] + "\n")
    inputs = gather([runs / "small_gecko/seed-0", folder])
    build_sections(inputs)
    assert inputs.left_out[0] == ("small_gecko", "held-out loss: not measured in every run")


def test_runs_on_other_texts_are_drawn_apart(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "small_gecko/seed-0", "small_gecko", 0)
    run = small_run(tmp_path / "small_gecko/seed-0", "small_gecko", 0)
    replace(run, data=replace(run.data, source="other")).save(run.folder / "recipe.json")
    for folder, pictures in ((runs / "small_gecko/seed-0", 3), (run.folder, 6)):
        assert len(sections(gather([runs / "small_chunk/seed-0", folder]))["Training"].pictures) == pictures
