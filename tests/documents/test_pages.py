"""Every block of the documents is run by ``check.py``, or ``pages.toml`` says why not."""

import re
from collections import Counter
from pathlib import Path

import pytest
from documents import cli_page
from documents.plan import PAGES, ROOT, Step, indented_commands, name_of, notes, steps


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_is_run_or_listed(path: Path) -> None:
    assert [step.place for step in steps(path) if step.kind == "other" and not step.note.not_run] == []
    place = "a command stands in a fenced block after $, where the check finds it"
    assert indented_commands(path.read_text(encoding="utf-8")) == [], place
    for step in steps(path):
        if not step.note.not_run:
            assert step.runnable
        if step.kind == "python" and not step.text.startswith(">>>"):
            compile(step.text, step.place, "exec")


def test_every_note_is_about_something_on_its_page() -> None:
    used = Counter(step.note for path in PAGES for step in steps(path))
    assert [f"{note.page}: {note.starts}" for note in notes() if note not in used] == []
    assert all(
        note.not_run != "" or note.small or note.given or note.varies or note.exit or note.free for note in notes()
    )


def test_most_of_what_the_pages_show_is_run() -> None:
    shown = [step for path in PAGES if path.parent != ROOT / "examples" for step in steps(path)]
    run = [step for step in shown if not step.note.not_run]
    assert len(run) > 80 and {step.kind for step in run} == {"command", "python", "file"}


def test_the_reference_of_the_command_line_is_what_the_commands_say() -> None:
    """An option that is added or removed appears on the page."""
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.whole_page(), "run: python tests/documents/cli_page.py"


QUESTIONS = {
    "install": "pip install", "train on my text": "gecko train", "resume": "--resume", "fine-tune": "gecko finetune",
    "chat": "gecko chat", "serve": "gecko serve", "long book": "gecko read", "convert": "gecko convert",
    "evaluate": "gecko eval", "many GPUs": "torchrun",
}  # fmt: skip
"""Questions of newcomers, each with a part of the command that answers it."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_start_page_answers_a_question_and_links_to_more(question: str) -> None:
    """The row has the command; one click leads to a page or section that shows it."""
    start = ROOT / "docs" / "index.md"
    row = next(
        line for line in start.read_text(encoding="utf-8").splitlines() if re.match(rf"\| .*{question}.*\?\]", line)
    )
    _, asked, command, _ = row.split("|")
    assert QUESTIONS[question] in command
    target = re.search(r"\]\((\w+\.md)(?:#([\w-]+))?\)", asked)
    assert target is not None
    shown = _steps_of_section(ROOT / "docs" / target[1], target[2])
    assert any(QUESTIONS[question] in step.text for step in shown), "the section must show the command"


def _steps_of_section(page: Path, anchor: str | None) -> list[Step]:
    """Return the steps of a page, or of the section whose heading has the anchor."""
    if anchor is None:
        return steps(page)
    lines = page.read_text(encoding="utf-8").splitlines()
    headings = [place for place, line in enumerate(lines, 1) if line.startswith("#")]
    begin = next(place for place in headings if _anchor(lines[place - 1]) == anchor)
    end = next((place for place in headings if place > begin), len(lines) + 1)
    return [step for step in steps(page) if begin <= step.line < end]


def _anchor(heading: str) -> str:
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lstrip("# ").lower()))
