"""Which scores are shown together, and which separately."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gecko.experiments.report import build_sections
from gecko.experiments.report.material import EvaluationFile, Material, gather
from gecko.experiments.report.tables import Section


def sections(material: Material) -> dict[str, Section]:
    return {section.title: section for section in build_sections(material)}


def cells(section: Section, table: int = 0) -> list[list[str]]:
    return [[cell.value for cell in row] for row in section.tables[table].rows]


def changed(file: EvaluationFile, name: str, seed: int = 0, **values: Any) -> EvaluationFile:
    """Return a result file of another model, with other ``values``."""
    record = copy.deepcopy(dict(file.record))
    record["model"] |= {"name": f"{name}/seed-{seed}"}
    for key, value in values.items():
        record["model" if key == "tokenizer" else "settings"][key] = value
    return EvaluationFile(Path(f"{name}-{seed}.json"), record)


@pytest.fixture
def perplexity(runs: Path) -> EvaluationFile:
    return gather([runs / "small_gecko" / "seed-0" / "eval" / "perplexity.json"]).evaluations[0]


def only(files: Sequence[EvaluationFile]) -> Material:
    return Material(evaluations=list(files))


def test_values_are_means_over_seeds(runs: Path) -> None:
    found = sections(gather([runs]))["Perplexity by context length"]
    records = [json.loads((runs / "small_gecko" / f"seed-{seed}" / "eval" / "perplexity.json").read_text())
               for seed in (0, 1)]  # fmt: skip
    first = [record["scores"][0] for record in records]
    assert first[0]["where"] == {"context": 64} and first[0]["name"] == "nats a token"
    assert cells(found)[0] == [
        "64",
        "nats a token",
        cells(found)[0][2],
        f"{(first[0]['value'] + first[1]['value']) / 2:.4f}",
    ]
    assert "Student's t over 2 seeds" in found.tables[0].notes[0]
    assert "2,048 tokens for each seed" in found.tables[0].rows[0][3].detail


def test_other_tokenizers_and_texts_are_drawn_apart(perplexity: EvaluationFile) -> None:
    together = sections(only([perplexity, changed(perplexity, "b")]))
    assert len(together["Perplexity by context length"].pictures) == 1
    for change in ({"tokenizer": "olmo.json"}, {"texts": ["another.txt"]}):
        apart = sections(only([perplexity, changed(perplexity, "b", **change)]))["Perplexity by context length"]
        assert len(apart.pictures) == len(apart.tables) == 2
        assert "have their own pictures" in apart.intro
    elsewhere = changed(perplexity, "b", texts=["elsewhere/book.txt"])
    assert len(sections(only([perplexity, elsewhere]))["Perplexity by context length"].pictures) == 1


def test_the_same_score_twice_is_shown_once_and_stated(perplexity: EvaluationFile) -> None:
    material = only([changed(perplexity, "a"), EvaluationFile(Path("again.json"), changed(perplexity, "a").record)])
    found = sections(material)["Perplexity by context length"]
    assert len(found.tables[0].columns) == 3
    assert material.left_out == [("again.json", "perplexity: some scores are of a model and seed shown already")]


def test_p_values_are_not_averaged(runs: Path) -> None:
    table = sections(gather([runs]))["Loss by position"].tables[0]
    rows = {row[0].value: row[1] for row in table.rows}
    assert ";" in rows["p, two-sided"].value and "no interval" not in rows["p, two-sided"].detail
    assert ";" not in rows["border minus rest"].value


def test_renewed_norms_are_another_line(perplexity: EvaluationFile) -> None:
    record = copy.deepcopy(dict(perplexity.record))
    kinds = ("all that was read", "last 6 chunks")
    record["scores"] = [score | {"where": {"norm statistics of": kind, **score["where"]}}
                        for kind in kinds for score in record["scores"]]  # fmt: skip
    record["details"] = {kind: record["details"] for kind in kinds}
    found = sections(only([EvaluationFile(Path("r.json"), record, perplexity.run)]))["Perplexity by context length"]
    labels = [name for name, _ in found.tables[0].columns[2:]]
    assert len(labels) == 2 and labels[1] == f"{labels[0]}, norms of the last 6 chunks"


def test_shares_and_percentages_are_percent_beside_the_papers(results: Path) -> None:
    found = sections(gather([results / "piqa.json", results / "story.json"]))
    academic = found["Academic tasks"]
    assert cells(academic) == [["piqa", "hub", "acc", "35.0"]]
    assert academic.tables[0].rows[0][3].detail == "18.1 to 56.7; n 20 items"
    assert [table.published for table in academic.tables] == [False, True, True]
    questions = found["Questions about long documents"]
    assert cells(questions) == [["narrative_qa", "story.jsonl, answers of 64 tokens", "F1", "30.0"]]
    assert questions.tables[0].rows[0][3].detail == "0.0 to 60.0; n 10 questions"
    assert [table.published for table in questions.tables] == [False, True]


@pytest.mark.parametrize(("name", "scale"), [("piqa.json", 1), ("story.json", 100), ("passkey.json", 1)])
def test_shares_over_seeds_stay_within_0_and_100_percent(results: Path, name: str, scale: int) -> None:
    file = gather([results / name]).evaluations[0]
    files = [changed(file, "a", seed) for seed in range(3)]
    for one, value in zip(files, (0.9, 1.0, 1.0), strict=True):
        one.record["scores"][0]["value"] = value * scale
    (section,) = sections(only(files)).values()
    assert section.tables[0].rows[0][3].detail.startswith("82.3 to 100.0; ")
    assert "cut at 0 and 100 %" in section.tables[0].notes[0]


def test_synthetic_models_are_named_by_what_differs(results: Path) -> None:
    files = [results / "mqar-adaptive.json", results / "mqar-none.json"]
    found = sections(gather(files))["Synthetic tasks"]
    assert [name for name, _ in found.tables[0].columns] == [
        "chunks before the question", "memory=adaptive", "memory=none",
    ]  # fmt: skip
    assert len(found.pictures) == 1 and "guessing" in found.tables[0].notes[1].lower()


def test_retrieval_has_a_map_for_each_model(results: Path) -> None:
    file = gather([results / "passkey.json"]).evaluations[0]
    found = sections(only([file, changed(file, "other")]))["Retrieval: passkey"]
    assert len(found.pictures) == 2 and found.statement is not None
    assert [row[1].value for row in found.tables[0].rows][:4] == ["0 %", "0 %", "100 %", "100 %"]


def test_needles_in_other_texts_are_drawn_apart(results: Path) -> None:
    file = gather([results / "passkey.json"]).evaluations[0]
    names = ("emma.txt", "x/emma.txt", "walden.txt")
    material = only([changed(file, "a", task="niah_single_2", texts=[name]) for name in names])
    found = sections(material)["Retrieval: needle in texts"]
    assert [table.title for table in found.tables] == [
        "Needle in texts (niah_single_2), in emma.txt", "Needle in texts (niah_single_2), in walden.txt",
    ]  # fmt: skip
    assert [picture.caption for picture in found.pictures] == ["a, in emma.txt", "a, in walden.txt"]
    assert len(material.left_out) == 1, "the same book from another folder is the same"


@pytest.mark.parametrize("name", ["story.json", "piqa.json"])
def test_tasks_on_other_data_are_other_rows(results: Path, name: str) -> None:
    file = gather([results / name]).evaluations[0]
    changes = ({}, {"data": "other.jsonl"}, {"limit": 5}, {"shots_data": "train.jsonl"}, {"new_tokens": 9})
    material = only([changed(file, "a", **change) for change in changes])
    (section,) = sections(material).values()
    assert len(cells(section)) == len(changes) and not material.left_out
    words = ("", "other.jsonl", "first 5", "shots of train.jsonl", "of 9 tokens")
    assert all(said in row[1] for row, said in zip(cells(section), words, strict=True))


def test_a_seed_trained_twice_is_left_out(runs: Path, copied: Any) -> None:
    folder = copied("small_gecko", 0)
    material = gather([runs / "small_gecko" / "seed-0", folder])
    assert cells(sections(material)["Training"])[0][:2] == ["small_gecko", "0"]
    assert material.left_out[0][0] == str(folder) and "with the same seed" in material.left_out[0][1]


def test_runs_on_other_texts_are_drawn_apart(runs: Path, copied: Any) -> None:
    folder = copied("small_gecko", 0)
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["data"]["source"] = "other"
    (folder / "recipe.json").write_text(json.dumps(recipe))
    together = sections(gather([runs / "small_chunk" / "seed-0", runs / "small_gecko" / "seed-0"]))["Training"]
    apart = sections(gather([runs / "small_chunk" / "seed-0", folder]))["Training"]
    assert (len(together.pictures), len(apart.pictures)) == (3, 6)
