"""What is run of the documents, and how: the commands and snippets of a page with the notes of ``pages.toml``."""

import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
_CELL = re.compile(r"\| `(?P<text>(?:gecko|torchrun) [^`|]+)` (?=\|)")
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|…|\.\.\.")
_INDENTED = re.compile(r"^ {4,}(?:\$ )?(?:gecko|python|pip|make|torchrun) .*$", re.MULTILINE)


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

    def kept(self, text: str) -> str:
        """Leave out the lines that depend on the machine."""
        return "\n".join(line for line in text.splitlines() if not self.varies or not re.search(self.varies, line))


@dataclass(frozen=True)
class Step:
    """One thing to run, or not to run: a command or a Python snippet, with its output on the page."""

    page: str
    line: int
    """Line of the page on which the text begins."""
    kind: str
    """``command``, ``python``, ``file`` (a snippet to be saved) or ``other`` (neither)."""
    text: str
    output: str = ""
    title: str = ""
    """Name of the file as which the page says to save the text."""
    note: Note = field(default_factory=lambda: Note(""))

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
    name, found = name_of(path), []
    for step in shown_steps(path.read_text(encoding="utf-8"), name):
        suitable = (note for note in notes() if fnmatch(name, note.page) and step.text.startswith(note.starts))
        found.append(replace(step, note=next(suitable, Note(name))))
    return found


def shown_steps(content: str, name: str) -> list[Step]:
    """Return the commands and snippets of a page with their outputs, in its order.

    A command stands after ``$`` in a block, and continues on the next line after ``\\``; output follows it. The output
    of a snippet is the block after it, if only empty lines lie between. Of tables, cells are commands without those
    that have placeholders.
    """
    found, end, snippet = list[Step](), 0, False
    for block in _FENCE.finditer(content):
        line = content.count("\n", 0, block.start()) + 2
        text = textwrap.dedent(block["text"]) if block["indent"] else block["text"]
        lines, joined = text.splitlines(), not content[end : block.start()].strip()
        starts = [number for number, row in enumerate(lines) if row.startswith("$ ")]
        if block["language"] == "python":
            title = block["title"] or ""
            found.append(Step(name, line, "file" if title else "python", text, title=title))
        elif starts:
            for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
                rest = start
                while lines[rest].endswith("\\") and rest + 1 < stop:
                    rest += 1
                command = "\n".join(lines[start : rest + 1]).removeprefix("$ ")
                found.append(Step(name, line + start, "command", command, "\n".join(lines[rest + 1 : stop])))
        elif snippet and joined and not block["language"]:
            found[-1] = replace(found[-1], output=text)
        else:
            found.append(Step(name, line, "other", text))
        end, snippet = block.end(), block["language"] == "python"
    for cell in _CELL.finditer(content):
        if not _PLACEHOLDER.search(cell["text"]):
            found.append(Step(name, content.count("\n", 0, cell.start()) + 1, "command", cell["text"]))
    return sorted(found, key=lambda step: step.line)


def indented_commands(content: str) -> list[str]:
    """Return the lines outside of fenced blocks that show a command by indentation, which no reader of blocks sees."""
    return _INDENTED.findall(_FENCE.sub("", content))
