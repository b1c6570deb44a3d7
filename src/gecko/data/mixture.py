"""Rows of several sources in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gecko.data.loader import Row, Rows
from gecko.data.packing import permutation

BLOCK = 1024
"""Rows in which the proportions come out exactly."""
MIXTURE_STREAM = 1 << 32
"""The first of the random streams of the blocks: far from those of epochs."""


class MixedRows:
    """Of every ``BLOCK`` rows in a row, each source gives ``counts[source]``, in a random order of the block's own.

    A source's rows come in that source's own order, so that row i, of which source it is and which of its rows, is
    a function of the seed and i. A source that comes to its end begins again.

    Raises:
        ValueError: a weight is not above 0, or so small that it gives no row of a block.
    """

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], seed: int) -> None:
        self.counts = block_counts(weights)
        self._sources = list(sources)
        self._block = lru_cache(maxsize=2)(lambda block: _order(self.counts, seed, block))
        # Until the first source begins again.
        self.rows_per_epoch = min(
            rows.rows_per_epoch * BLOCK // count for rows, count in zip(sources, self.counts, strict=True)
        )

    def row(self, index: int) -> Row:
        source, own_index = self.origin(index)
        return self._sources[source].row(own_index)

    def origin(self, index: int) -> tuple[int, int]:
        """Which source a row is of, and which of that source's rows it is."""
        block, place = divmod(index, BLOCK)
        sources, ordinals = self._block(block)
        source = int(sources[place])
        return source, block * self.counts[source] + int(ordinals[place])


def block_counts(weights: Sequence[float]) -> list[int]:
    """``BLOCK`` divided in proportion to the weights; what is left over goes to the largest remainders."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"the weight of a source must be a number above 0; got {list(weights)}.")
    shares = [BLOCK * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source])
    for source in by_remainder[: BLOCK - sum(counts)]:
        counts[source] += 1
    if min(counts) == 0:
        raise ValueError(
            f"a source must have at least 1/{2 * BLOCK} of all weights, or it would never be read; got {list(weights)}."
        )
    return counts


def _order(counts: Sequence[int], seed: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every row of a block its source, and how many rows of that source come before it in the block."""
    sources = np.repeat(np.arange(len(counts)), counts)[permutation(BLOCK, seed, MIXTURE_STREAM + block)]
    ordinals = np.empty(BLOCK, np.int64)
    for source, count in enumerate(counts):
        ordinals[sources == source] = np.arange(count)
    return sources, ordinals
