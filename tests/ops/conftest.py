"""Operators are tested on poisoned memory only."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _poisoned(poisoned: None) -> None:
    pass
