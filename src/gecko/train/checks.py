"""Checks of numbers in a run and its settings; messages name them as overrides do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def check_counts(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 1."""
    _check(settings, names, prefix, lambda value: value >= 1, "must be at least 1")


def check_positive(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not above 0 and finite."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite")


def check_limits(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """The same of attributes that may be left out, as None."""
    _check(settings, names, prefix, lambda value: 0 < value < math.inf, "must be above 0 and finite, or none")


def check_not_negative(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 0 or not finite."""
    _check(settings, names, prefix, lambda value: 0 <= value < math.inf, "must be 0 or above, and finite")


def check_fractions(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not in 0..1."""
    _check(settings, names, prefix, lambda value: 0 <= value <= 1, "is a fraction and must lie in 0..1")


def _check(settings: object, names: Sequence[str], prefix: str, holds: Callable[[float], bool], rule: str) -> None:
    """None is no number; fields that may not be None are refused before, by their type."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):
            raise ValueError(f"{prefix}{name} {rule}; got {value}.")
