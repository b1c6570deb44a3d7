"""One token of several sequences through a whole network, in C (``cpu.py``) or on a GPU (``triton.py``).

``inference/decoder.py`` calls them. They read weights and states as records: of numbers, tensors, weights and other
records.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

REGISTER = 64
"""Rows of weights are whole registers of a CPU in every format: multiples of 64 numbers."""
GROUP = 32
"""Consecutive weights of a row that share a scale in 4 bits."""

Record = dict[str, Any]
"""Fields of a structure: numbers, tensors, weights, and records of structures within it."""


class Weights(NamedTuple):
    """A weight matrix as the kernels read it, (outputs, inputs), inputs padded with zeros to whole registers.

    ``weight`` is float32, bfloat16, int8 with one ``scale`` per output, or uint8 with two numbers of 4 bits per byte
    and one ``scale`` per ``GROUP`` inputs.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.weight.shape[1] * (2 if self.weight.dtype == torch.uint8 else 1)
