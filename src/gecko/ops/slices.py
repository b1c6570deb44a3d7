"""Slices of tokens that stay in a core's cache while one pass after the other goes over them.

A pass over activations that lie in memory takes several times what it takes in the cache. So operators that form their
gradients by hand on a CPU take their passes slice by slice, and write only what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

_NUMBERS = 2**17
"""Of one tensor in a slice, for each thread: of float32, a quarter of a cache of 2 MB."""


def slices(rows: int, length: int, features: int) -> Iterator[tuple[slice, slice]]:
    """The (rows, steps) of each slice of a batch."""
    tokens = max(1, _NUMBERS * torch.get_num_threads() // features)
    height, width = max(1, tokens // length), min(length, tokens)
    for row, step in product(range(0, rows, height), range(0, length, width)):
        yield slice(row, row + height), slice(step, step + width)
