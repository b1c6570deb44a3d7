"""What is run of the documents, and how: their blocks with the notes of ``pages.toml``."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from documents.blocks import Block, Command, blocks, commands, table_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


@dataclass(frozen=True)
class Note:
    """What ``pages.toml`` says about the commands or blocks of a page whose text begins with ``starts``."""

    page: str
    """Pattern of the path in the repository, such as ``docs/*``."""
    starts: str = ""
    not_run: str = ""
    """Why it is not run."""
    small: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Replacements that make it small."""
    given: str = ""
    """Python that defines what the text around a snippet says to exist."""
    varies: str = ""
    """Regular expression of the lines that depend on the machine."""
    exit: int | None = None
    """Exit code, if it is not 0, and not 2 of an output that shows an error."""
    free: bool = False
    """Whether the output is text of a model, of which nothing can be compared."""

    def suits(self, page: str, text: str) -> bool:
        return fnmatch(page, self.page) and text.startswith(self.starts)


@dataclass(frozen=True)
class Step:
    """One thing to run, or not to run: a command or a Python snippet, with its output on the page."""

    page: str
    line: int
    kind: str
    """``command``, ``python``, ``file`` (a snippet to be saved) or ``other`` (neither)."""
    text: str
    output: str
    title: str
    note: Note

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runnable(self) -> str:
        """The text at a small size. ValueError if it lacks what the note replaces."""
        text = self.text
        for old, new in self.note.small.items():
            if old not in text:
                raise ValueError(f"{self.place} must contain {old!r}, which pages.toml replaces; it does not.")
            text = text.replace(old, new)
        return text


@cache
def settings() -> dict[str, Any]:
    """Return the content of ``pages.toml``."""
    return tomllib.loads(Path(__file__).with_name("pages.toml").read_text(encoding="utf-8"))


@cache
def notes() -> tuple[Note, ...]:
    """Return the notes of ``pages.toml`` in the order of the file."""
    return tuple(Note(**entry) for entry in settings()["note"])


def name_of(path: Path) -> str:
    """Return the path of a page in the repository."""
    return path.relative_to(ROOT).as_posix()


def steps(path: Path) -> list[Step]:
    """Return what a page shows, in its order. The first note of ``pages.toml`` that suits is taken."""
    found = [*_block_steps(path), *(_command_step(path, command) for command in table_commands(path))]
    return sorted(found, key=lambda step: step.line)


def _block_steps(path: Path) -> Iterator[Step]:
    shown = list(blocks(path))
    for number, block in enumerate(shown):
        if block.language == "python":
            kind = "python" if block.title is None else "file"
            after = shown[number + 1] if number + 1 < len(shown) else None
            output = after.text if after is not None and _is_output(after) else ""
            yield _step(path, block.line, kind, block.text, output, block.title or "")
        elif found := list(commands(block)):
            yield from (_command_step(path, command) for command in found)
        elif not (_is_output(block) and number and shown[number - 1].language == "python"):
            yield _step(path, block.line, "other", block.text)


def _is_output(block: Block) -> bool:
    return not block.language and block.joined and not block.text.startswith("$ ")


def _command_step(path: Path, command: Command) -> Step:
    return _step(path, command.line, "command", command.text, command.output)


def _step(path: Path, line: int, kind: str, text: str, output: str = "", title: str = "") -> Step:
    page = name_of(path)
    note = next((note for note in notes() if note.suits(page, text)), Note(page))
    return Step(page, line, kind, text, output, title, note)
