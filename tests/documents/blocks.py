"""Code blocks of a Markdown page, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)


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


@dataclass(frozen=True)
class Command:
    """A command after ``$``, with the output that the page shows below it."""

    page: str
    line: int
    text: str
    output: str


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page in order."""
    page = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(page):
        line = page.count("\n", 0, found.start()) + 2
        yield Block(path.name, line, found["language"], found["title"], found["text"])


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
