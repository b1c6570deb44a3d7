"""Targets of links in the documents exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FILE = re.compile(r"\b((?:benchmarks|docs|tests|src)/[\w/.-]+\.(?:py|md|h|c|json|html|png|svg|pdf))\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_of_a_page_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    assert [name for name in LINK.findall(text) if not (page.parent / name).exists()] == []
    places = (ROOT, ROOT / "tests")  # CONTRIBUTING names tests by their path within tests/
    assert [name for name in FILE.findall(text) if not any((place / name).exists() for place in places)] == []


def test_pages_are_looked_into():
    assert len(PAGES) > 10 and sum(len(FILE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 30
