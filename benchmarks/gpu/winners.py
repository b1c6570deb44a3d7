"""Which variants become the choice: the fastest of each family that is as right as the eager form."""

from __future__ import annotations

from collections.abc import Sequence

from gpu.record import TODAY, Tried
from gpu.variants import Variant, of_operators

AHEAD = 0.97
"""Share of the time of the chosen form that a variant may take at most: less is more than the spread of two runs."""


def won(found: Sequence[Tried], dtype: str) -> list[Variant]:
    """Return the winning variant of each family that has one."""
    variants = {str(variant): variant for _, family in of_operators() for variant in family}
    winners = []
    for family in dict.fromkeys(x.family for x in found):
        tried = [x for x in found if x.family == family and x.seconds and x.agreement]
        right = [x for x in tried if x.agreement is not None and x.agreement.is_wrong(dtype) is False]
        now = next((x.seconds for x in tried if x.variant == TODAY), None)
        best = min(right, key=lambda x: x.seconds or 0.0, default=None)
        if now and best and best.seconds and best.variant != TODAY and best.seconds <= AHEAD * now:
            winners.append(variants[f"{family}: {best.variant}"])
    return winners
