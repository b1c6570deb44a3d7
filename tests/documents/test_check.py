"""The check of the documents finds commands and snippets that do not do what their page shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from documents.check import Page
from documents.plan import Note, Step

RIGHT = [
    ("command", "echo read 3 tokens", "read 5 tokens"),
    ("command", "echo anything", ""),
    ("command", "echo 'error: no file a' >&2; (exit 2)", "error: no file a"),
    ("command", "echo 'not equal'; (exit 1)", "not equal", Note("", exit=1)),
    ("command", "echo; echo memory 3 GB", "memory none", Note("", varies="^memory")),
    ("command", "echo some text", "other text", Note("", free=True)),
    ("command", 'echo "$before"', "kept"),
    ("command", "echo five", "3", Note("", small={"five": "5"})),
    ("python", "print([x, 'a'])", "[7, 'b']", Note("", given="x = 5")),
    ("python", ">>> int('a')\nValueError: invalid literal for int() with base 10: 'a'\n>>> 1 + 1\n3", ""),
]
WRONG = [
    ("command", "echo read 3 bytes", "read 5 tokens"),
    ("command", "false", ""),
    ("command", "no-such-command", ""),
    ("command", "echo 'error: no file a'", "error: no file a"),
    ("command", "echo 'error: no file b' >&2; (exit 2)", "error: no file a"),
    ("python", "print('a')", "1"),
    ("python", ">>> int('3')\nValueError: invalid literal for int() with base 10: 'a'", ""),
    ("other", "a tree of files", ""),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("page"))
    page.shell.run("before=kept")
    yield page
    page.shell.close()


def step(kind: str, text: str, output: str, note: Note = Note("")) -> Step:  # noqa: B008 (it is frozen)
    return Step("page.md", 1, kind, text, output, "", note)


@pytest.mark.parametrize("shown", RIGHT, ids=lambda shown: shown[1])
def test_what_agrees_with_its_page(page: Page, shown: tuple) -> None:
    assert page.run(step(*shown)) == ""


@pytest.mark.parametrize("shown", WRONG, ids=lambda shown: shown[1])
def test_what_does_not(page: Page, shown: tuple) -> None:
    assert page.run(step(*shown)) != ""


def test_notes_beside_a_model_s_text_are_compared_and_the_text_is_not(page: Page, tmp_path: Path) -> None:
    command = "gecko generate demo"
    (page.shell.folder / "bin").mkdir()
    program = page.shell.folder / "bin" / "gecko"
    program.write_text("#!/bin/bash\necho some text; echo wrote 3 tokens >&2\n")
    program.chmod(0o755)
    assert page.run(step("command", command, "other text\nwrote 9 tokens")) == ""
    assert page.run(step("command", command, "other text\nwrote 9 bytes")) != ""
    assert page.run(step("command", command, "other text", Note("", varies="^wrote"))) == ""


def test_a_snippet_that_is_to_be_saved_is(page: Page) -> None:
    assert page.run(Step("page.md", 1, "file", "print(1)\n", "", "saved.py")) == ""
    assert (page.shell.folder / "saved.py").read_text() == "print(1)\n"
