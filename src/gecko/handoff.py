"""What a call needs from the ranks that hold the earlier tokens of the same rows.

Operators see these faces only; ``gecko.parallel.context`` is behind them. On one device there are none.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Arriving(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """The tensor, once it is here. Called exactly once, on every rank."""


class Handoff(Protocol):
    """One call's exchange among R ranks that hold consecutive runs of whole chunks, as many each.

    A rank gives what its own tokens come to, and adds what arrives to the state it was called with: that is
    the call's on rank 0 and the empty one on the others. What would come from before rank 0 is zero. So every
    rank runs the same operations, and backward meets the same exchanges in reverse order on all of them.
    """

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""

    @property
    def counts(self) -> Tensor:
        """(R − 1, B) int64: tokens of the document before my first token that the rank i + 1 places before me holds,
        with what rank 0 had read of it in earlier calls; 0 where the document began after them."""

    @property
    def chunks_reach(self) -> Tensor:
        """(R − 1, B, 2) bool: whether the last chunk but one before me is of a document that was there at the end of
        [the last chunk but one, the last chunk] of the rank i + 1 places before me."""

    def previous(self, x: Tensor) -> Arriving:
        """Give x to the next rank; the same of the rank before arrives."""

    def earlier(self, x: Tensor) -> Arriving:
        """Give x to all later ranks; the same of all earlier ones arrives, (R − 1, …), the nearest first."""
