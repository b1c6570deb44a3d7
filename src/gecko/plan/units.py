"""What plans count in."""

from __future__ import annotations

from typing import NamedTuple

FLOAT, HALF = 4, 2
"""Bytes of a float32, which states, gradients and optimizer moments are, and of a bfloat16."""


class Flops(NamedTuple):
    """Floating-point operations, two for a multiplication and its addition."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def twice_backward(forward: float) -> Flops:
    return Flops(forward, 2 * forward)
