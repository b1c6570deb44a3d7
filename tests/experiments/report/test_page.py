"""The whole page: one file without external files that shows all inputs and marks published numbers."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
from markupsafe import escape
from typer.testing import CliRunner

from gecko.cli import app
from gecko.experiments.report import write_page
from gecko.experiments.report.tables import TABLES, published

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def page_file(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_page(inputs, out, "gecko report <runs>")
    return out


@pytest.fixture(scope="session")
def page(page_file: Path) -> str:
    return page_file.read_text(encoding="utf-8")


class Texts(html.parser.HTMLParser):
    """Collects the texts inside and outside of elements of class ``published``."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.published: list[str] = []
        self.measured: list[str] = []
        self._depth = 0
        self.feed(re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self._depth += self._depth > 0 or ("class", "published") in attrs

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._depth -= self._depth > 0

    def handle_data(self, data: str) -> None:
        (self.published if self._depth else self.measured).append(data)


def test_loads_nothing_from_elsewhere(page: str) -> None:
    links = re.findall(r"(?:src|href|url|action)\s*[=(]\s*[\"']?([^\"')>\s]+)", page)
    assert links and all(link.startswith("#") for link in links)
    assert "<script" not in page and "@import" not in page


def test_every_section_is_there(page: str) -> None:
    assert page.count("<svg") == 3 + 1 + 2 + 1 + 1
    for title in (
        "Training",
        "Perplexity by context length",
        "Loss by position",
        "Retrieval: passkey",
        "Academic tasks",
        "Questions about long documents",
        "Synthetic tasks",
        "Reproduction",
        "Inputs",
    ):
        assert f"<h2>{title}</h2>" in page, title  # fmt: skip


def test_published_numbers_are_marked_and_nowhere_else(page: str) -> None:
    texts = Texts(page)
    for name in TABLES:
        form = "{:.2f}" if name == "training_loss" else "{:.1f}"
        numbers = {
            form.format(value) for row in published(name)["rows"] for value in row["values"] if value is not None
        }
        assert numbers <= set(texts.published), name
    assert "Megalodon" in texts.published and "Megalodon" not in texts.measured
    assert page.count('<span class="mark">published</span>') == 1 + len(TABLES) + 3


def test_says_what_was_given_and_how_to_get_it_again(page: str, inputs: list[Path]) -> None:
    for path in inputs:
        assert f"<td>{path}</td>" in page
        if path.suffix == ".json":
            assert str(escape(json.loads(path.read_text())["command"])) in page
    assert "gecko train small_gecko" in page and "PyTorch" in page
    assert "gecko report &lt;runs&gt;" in page and "<runs>" not in page


def test_the_same_inputs_give_the_same_page(page: str, inputs: list[Path], tmp_path: Path) -> None:
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
