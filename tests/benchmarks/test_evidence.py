"""The first table of docs/evidence.md and the pages beside the results have the numbers of the result files."""

from __future__ import annotations

from types import ModuleType

import evidence
import ladder
import long_context
import memory_forms
import numpy as np
import order_by_size
import pytest
import retrieval


def test_the_table_has_the_numbers_of_the_files() -> None:
    page = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.BEGIN + evidence.table() + evidence.END in page, "run: python benchmarks/evidence.py --write"
    assert ladder.BEGIN + ladder.page() + ladder.END in page, "run: python benchmarks/evidence.py --write"


@pytest.mark.parametrize("module", [retrieval, long_context, order_by_size, memory_forms])
def test_the_pages_have_the_numbers_of_the_files(module: ModuleType) -> None:
    assert (module.FOLDER / "README.md").read_text(encoding="utf-8") == module.page()


def test_the_line_is_a_power_law_through_the_means_of_sizes() -> None:
    points = [(size, 3 * size**-0.1 + error) for size in (10**6, 4 * 10**6, 15 * 10**6) for error in (-0.01, 0.01)]
    assert order_by_size.power_law(points) == pytest.approx((3, 0.1))
    assert order_by_size.power_law(points[:2]) is None


@pytest.mark.parametrize("context", long_context.CONTEXTS)
def test_a_byte_without_an_earlier_match_keeps_the_loss_of_the_model(context: str) -> None:
    """The second half of the texts repeats the first half, of which no context occurs twice."""
    texts = [bytes(range(first, first + 60)) * 2 for first in (0, 130)]
    losses, window = np.ones((2, 120)), long_context.CONTEXTS[context]
    mixed = long_context.mixed_losses(losses, [long_context.matches(text) for text in texts], window)
    assert (mixed[:, :65] == losses[:, :65]).all() and (mixed[:, 80:] < 0.1).all()
