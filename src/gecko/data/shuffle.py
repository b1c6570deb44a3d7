"""A random order of any number of things that takes no memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Shuffle:
    """A permutation of ``range(count)`` that depends on nothing but its arguments, computed one place at a time.

    A Feistel network over the next even power of two; what falls outside ``count`` is mapped again until it does
    not, fewer than four times on average.
    """

    count: int
    half: int
    """Bits of each of the two halves of an index."""
    keys: tuple[int, ...]

    @classmethod
    def of(cls, count: int, seed: int, stream: int) -> Shuffle:
        # Raw draws, because NumPy promises those for all its versions.
        keys = np.random.PCG64((seed, stream)).random_raw(ROUNDS)
        return cls(count, max(1, -(-(count - 1).bit_length() // 2)), tuple(int(key) for key in keys))

    def __getitem__(self, index: int) -> int:
        """Where the permutation takes ``index``, which must lie in ``range(count)``."""
        place = self._once(index)
        while place >= self.count:
            place = self._once(place)
        return place

    def _once(self, index: int) -> int:
        mask = (1 << self.half) - 1
        left, right = index >> self.half, index & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half | right


def _mix(x: int) -> int:
    """The finaliser of MurmurHash3: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ (x >> 33)
