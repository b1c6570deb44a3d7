"""Every block of the documents is run by ``check.py``, or ``pages.toml`` says why not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from documents.blocks import indented_commands
from documents.plan import PAGES, ROOT, name_of, notes, steps


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_is_run_or_listed(path: Path) -> None:
    assert [step.place for step in steps(path) if step.kind == "other" and not step.note.not_run] == []
    assert indented_commands(path) == [], "a command stands in a fenced block after $, where the check finds it"
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
