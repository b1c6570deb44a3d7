"""The paper's printed numbers: whole tables, values in range, and column sums as in the paper's source."""

from __future__ import annotations

import pytest

from gecko.eval.academic import TASKS as ACADEMIC
from gecko.eval.scrolls import TASKS as SCROLLS
from gecko.experiments.report.tables import TABLES, published, published_table

SUMS = {
    "academic": [404.1, 767.8, 826.1, 869.5, 391.0, 756.6, 808.1, 516.7, 194.3, 443.7],
    "academic_1b": [131.0, 114.5, 148.6, 122.0, 121.5, 75.6],
    "scrolls": [150.6, 181.7, 80.5],
    "training_loss": [6.80],
}
COUNTS = {
    "academic": [9, 10, 11, 11, 8, 11, 11, 11, 8, 8], "academic_1b": [2] * 6, "scrolls": [7] * 3, "training_loss": [4],
}  # fmt: skip
RANGES = {"%": (1, 100), "nats a token": (1, 3)}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_whole(name: str) -> None:
    table = published(name)
    low, high = RANGES[table["unit"]]
    for row in table["rows"]:
        assert len(row["values"]) == len(table["columns"]) and len(row["facts"]) == len(table["facts"])
        assert all(value is None or low <= value <= high for value in row["values"])
    columns = [[row["values"][i] for row in table["rows"]] for i in range(len(table["columns"]))]
    assert [sum(value is not None for value in column) for column in columns] == COUNTS[name]
    assert [sum(value or 0 for value in column) for column in columns] == pytest.approx(SUMS[name], abs=0.01)
    assert len({(row["model"], *row["facts"]) for row in table["rows"]}) == len(table["rows"])
    assert table["source"] and table["label"] and table["metric"]


@pytest.mark.parametrize("name", ["academic", "academic_1b", "scrolls"])
def test_tasks_and_shots_are_those_that_evaluations_run(name: str) -> None:
    tasks = SCROLLS if name == "scrolls" else ACADEMIC
    for column in published(name)["columns"]:
        assert tasks[column["task"]].shots == column["shots"], column["name"]


def test_the_paper_says_itself_which_is_best() -> None:
    """They are bold in its tables."""
    best = {"academic": ["Gemma", {"Mistral", "Gemma"}, "Mistral", "Mistral", "Gemma", "Mistral", "Gemma", "Mistral",
                         "Llama 2", "Llama 2"],
            "academic_1b": ["Gecko", "Gecko", "Gecko", "OLMo1", "Gecko", "Gecko"],
            "scrolls": ["Gecko"] * 3}  # fmt: skip
    for name, winners in best.items():
        table = published(name)
        for i, winner in enumerate(winners):
            top = max(row["values"][i] or 0 for row in table["rows"])
            models = {row["model"] for row in table["rows"] if row["values"][i] == top}
            assert models == (winner if isinstance(winner, set) else {winner})


@pytest.mark.parametrize("name", TABLES)
def test_shown_tables_are_marked_and_lose_no_number(name: str) -> None:
    table, content = published_table(name), published(name)
    assert table.published and content["source"] in table.title
    shown = [cell.value for row in table.rows for cell in row[1 + len(content["facts"]) :] if cell.value]
    assert [float(text) for text in shown] == [
        value for row in content["rows"] for value in row["values"] if value is not None
    ]
