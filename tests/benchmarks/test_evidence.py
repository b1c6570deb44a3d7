"""The first table of docs/evidence.md and the pages beside the results have the numbers of the result files."""

from __future__ import annotations

from types import ModuleType

import evidence
import long_context
import pytest
import retrieval


def test_the_table_has_the_numbers_of_the_files() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.BEGIN + evidence.table() + evidence.END in page, "run: python benchmarks/evidence.py --write"


@pytest.mark.parametrize("module", [retrieval, long_context])
def test_the_pages_have_the_numbers_of_the_files(module: ModuleType) -> None:
    assert (module.FOLDER / "README.md").read_text(encoding="utf-8") == module.page()
