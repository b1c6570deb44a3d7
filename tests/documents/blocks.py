"""Code blocks of a Markdown page, and the commands in them."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
_CELL = re.compile(r"\| `(?P<text>(?:gecko|torchrun) [^`|]+)` (?=\|)")
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|…|\.\.\.")
_INDENTED = re.compile(r"^ {4,}(?:\$ )?(?:gecko|python|pip|make|torchrun) .*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: str
    line: int
    """Line of the page on which the text begins."""
    language: str
    title: str | None
    """Name of the file as which the page says to save the text."""
    text: str
    joined: bool
    """Whether only empty lines lie between the block before and this one."""


@dataclass(frozen=True)
class Command:
    """A command after ``$``, with the output that the page shows below it."""

    page: str
    line: int
    text: str
    output: str


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in order."""
    page, end = path.read_text(encoding="utf-8"), -1
    for found in _FENCE.finditer(page):
        line = page.count("\n", 0, found.start()) + 2
        joined = end >= 0 and not page[end : found.start()].strip()
        text = textwrap.dedent(found["text"]) if found["indent"] else found["text"]
        yield Block(path.name, line, found["language"], found["title"], text, joined)
        end = found.end()


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a block. A command continues on the next line after ``\\``; output follows it."""
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        rest = start
        while lines[rest].endswith("\\") and rest + 1 < end:
            rest += 1
        text = "\n".join(lines[start : rest + 1]).removeprefix("$ ")
        yield Command(block.page, block.line + start, text, "\n".join(lines[rest + 1 : end]))


def table_commands(path: Path) -> Iterator[Command]:
    """Yield the commands that are cells of a page's tables, without those that have placeholders."""
    page = path.read_text(encoding="utf-8")
    for found in _CELL.finditer(page):
        if not _PLACEHOLDER.search(found["text"]):
            yield Command(path.name, page.count("\n", 0, found.start()) + 1, found["text"], "")


def indented_commands(path: Path) -> list[str]:
    """Return the lines outside of fenced blocks that show a command by indentation, which no reader of blocks sees."""
    return _INDENTED.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
