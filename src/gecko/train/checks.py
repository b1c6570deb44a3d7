"""Checks of numbers in a run and its settings; messages name them as overrides do."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_counts(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 1; None is no number."""
    for name in names:
        count = getattr(settings, name)
        if count is not None and count < 1:
            raise ValueError(f"{prefix}{name} must be at least 1; got {count}.")


def check_positive(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not above 0 and finite; None is no number."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{prefix}{name} must be above 0 and finite; got {value}.")


def check_not_negative(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is below 0 or not finite."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{prefix}{name} must be 0 or above, and finite; got {value}.")


def check_limit(settings: object, name: str, prefix: str = "") -> None:
    """ValueError where an attribute that may be left out, as None, is not above 0 and finite."""
    limit = getattr(settings, name)
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"{prefix}{name} must be above 0 and finite, or none; got {limit}.")


def check_fractions(settings: object, names: Sequence[str], prefix: str = "") -> None:
    """ValueError where a named attribute is not in 0..1."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{prefix}{name} is a fraction and must lie in 0..1; got {value}.")
