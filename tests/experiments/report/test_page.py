"""The whole page: one file without external files that shows all inputs and marks published numbers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from support.corpora import words, write_corpus
from support.results import small_run
from typer.testing import CliRunner

from gecko.cli import app
from gecko.data import ByteTokenizer
from gecko.eval.academic import TASKS as ACADEMIC
from gecko.eval.scrolls import TASKS as SCROLLS
from gecko.eval.scrolls import Question, QuestionSet, scrolls
from gecko.experiments.inputs import gather
from gecko.experiments.report import TABLES, build_sections, published, write_page
from gecko.train import train

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def page_file(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_page(inputs, out, "gecko report <runs>")
    return out


def test_a_page_is_one_file_with_all_that_was_given(page_file: Path, inputs: list[Path], tmp_path: Path) -> None:
    page = page_file.read_text(encoding="utf-8")
    links = re.findall(r"(?:src|href|url|action)\s*[=(]\s*[\"']?([^\"')>\s]+)", page)
    assert links and all(link.startswith("#") for link in links) and "<script" not in page and "@import" not in page
    titles = ["Training", "Perplexity by context length", "Loss by position", "Retrieval: passkey", "Academic tasks",
              "Questions about long documents", "Synthetic tasks", "Reproduction", "Inputs"]  # fmt: skip
    assert re.findall("<h2>(.*?)</h2>", page) == re.findall('<a href="#part-[0-9]+">(.*?)</a>', page) == titles
    assert page.count("<svg") == 3 + 1 + 2 + 1 + 1
    assert page.count('<span class="mark">published</span>') == len(TABLES) + 3
    bare = re.sub('<div class="wide">|</table></div>', "", page)
    assert "Megalodon" in page and "Megalodon" not in re.sub('<div class="published">.*?</div>', "", bare, flags=re.S)
    for path in inputs:
        assert f"<td>{path}</td>" in page
        if path.suffix == ".json":
            assert str(escape(json.loads(path.read_text())["command"])) in page
    assert "gecko train small_gecko" in page and "gecko report &lt;runs&gt;" in page and "<runs>" not in page
    write_page(inputs, tmp_path / "again.html", "gecko report <runs>")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_command(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    (tmp_path / "other.json").write_text("{}")
    done = CliRunner().invoke(app, ["report", str(runs), "--out", str(out)])
    assert done.exit_code == 0 and "4 runs, 8 evaluations" in done.stdout
    assert "left out" in done.stderr and out.read_text(encoding="utf-8").endswith("</html>\n")
    before = out.read_bytes()
    for arguments, message in (
        ([str(tmp_path / "gone"), "-o", str(out)], "there is no"),
        ([str(tmp_path / "other.json"), "-o", str(out)], "must be a result file"),
        ([str(runs), "-o", str(tmp_path)], "--out must be a file"),
        ([str(runs), "-o", str(tmp_path / "other.json" / "r.html")], "--out must be a file"),
        ([], "Missing argument"),
    ):
        failed = CliRunner().invoke(app, ["report", *arguments])
        assert failed.exit_code == 2 and message in failed.stderr, arguments
    assert out.read_bytes() == before


class SaysRed:
    """A ``ScoredModel`` that gives one answer to all questions."""

    tokenizer = ByteTokenizer()

    def read(self, tokens: Any, after: None = None) -> None: ...

    def write(self, after: None, max_new_tokens: int, stops: Any = ()) -> str:
        return "Red."


def test_what_the_evaluations_write_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of real runs and evaluations, of the same code as the report."""
    run, book = small_run(tmp_path / "run", "small_gecko", 0), tmp_path / "book.txt"
    book.write_text(words(300), encoding="utf-8")
    monkeypatch.setattr("gecko.train.finish.write_report", lambda *_: None)
    train(run.with_settings(f"data.source={write_corpus(tmp_path / 'texts', 12)}", "steps=2"))
    commands = [
        ["perplexity", run.folder, book, "--lengths", "64,256,1K"],
        ["positions", run.folder, book, "--length", 128, "--chunk", 16],
        ["retrieval", run.folder, "passkey", "--lengths", "900", "--depths", "0,1", "--samples", 1],
        ["diagnose", "mqar", "steps=1", "size.length=32", "size.vocab_size=16", "size.items=2", "model.chunk_size=8",
         "test_rows=20"],
    ]  # fmt: skip
    for command in commands:
        out = run.folder / "eval" / f"{command[0]}.json"
        done = CliRunner().invoke(app, ["eval", *map(str, command), "--out", str(out)])
        assert done.exit_code == 0, done.output
    data = QuestionSet("story.jsonl", [Question("A story.", f"Which, {number}?", ("red",)) for number in range(3)])
    scrolls(SaysRed(), "narrative_qa", data).save(run.folder / "eval/story.json", {"name": "red"}, "gecko eval", {})
    found = gather([run.folder])
    titles = ("Training", "Perplexity", "Loss by position", "Retrieval", "Questions", "Synthetic")
    for section, title in zip(build_sections(found), titles, strict=True):
        assert section.title.startswith(title)
    assert found.left_out == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_fits_a_browser_at_any_width_and_asks_for_nothing(page_file: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab, asked = browser.new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        for width in (1200, 480, 360):
            tab.set_viewport_size({"width": width, "height": 800})
            tab.goto(page_file.as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach(it => it.open = true)")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            widths = tab.eval_on_selector_all("figure svg", "all => all.map(it => it.getBoundingClientRect().width)")
            assert all(0.5 * min(width, 480) < found <= width for found in widths)
        browser.close()
    assert set(asked) == {page_file.as_uri()}


SUMS = {
    "academic": [404.1, 767.8, 826.1, 869.5, 391.0, 756.6, 808.1, 516.7, 194.3, 443.7],
    "academic_1b": [131.0, 114.5, 148.6, 122.0, 121.5, 75.6],
    "scrolls": [150.6, 181.7, 80.5],
    "training_loss": [6.80],
}
COUNTS = {
    "academic": [9, 10, 11, 11, 8, 11, 11, 11, 8, 8], "academic_1b": [2] * 6, "scrolls": [7] * 3, "training_loss": [4],
}  # fmt: skip
BEST = {
    "academic": ["Gemma", "Mistral, Gemma", "Mistral", "Mistral", "Gemma", "Mistral", "Gemma", "Mistral", "Llama 2",
                 "Llama 2"],
    "academic_1b": ["Gecko", "Gecko", "Gecko", "OLMo1", "Gecko", "Gecko"], "scrolls": ["Gecko"] * 3,
    "training_loss": ["Llama 2"],
}  # fmt: skip
"""They are bold in the paper's tables."""


@pytest.mark.parametrize("name", TABLES)
def test_published_tables_are_whole_and_their_tasks_are_those_that_evaluations_run(name: str) -> None:
    table = published(name)
    assert table["source"] and table["label"] and table["metric"]
    for row in table["rows"]:
        assert len(row["values"]) == len(table["columns"]) and len(row["facts"]) == len(table["facts"])
    assert len({(row["model"], *row["facts"]) for row in table["rows"]}) == len(table["rows"])
    low, high = {"%": (1, 100), "nats a token": (1, 3)}[table["unit"]]
    tasks = {"scrolls": SCROLLS, "training_loss": {}}.get(name, ACADEMIC)
    for i, column in enumerate(table["columns"]):
        values = [row["values"][i] for row in table["rows"] if row["values"][i] is not None]
        assert len(values) == COUNTS[name][i] and all(low <= value <= high for value in values)
        assert sum(values) == pytest.approx(SUMS[name][i], abs=0.01)
        best = [row["model"] for row in table["rows"] if row["values"][i] == max(values)]
        assert ", ".join(best) == BEST[name][i]
        assert not tasks or tasks[column["task"]].shots == column["shots"]


@pytest.mark.parametrize("missing", ["scipy.stats", "matplotlib.figure", "jinja2"])
def test_missing_packages_are_named_before_anything_is_read(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=missing):
        write_page([tmp_path / "gone"], tmp_path / "page.html", "gecko report gone")
