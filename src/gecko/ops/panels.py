"""When the C kernels run whose weights a core's cache holds (``native_panels.h``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gecko.ops.kernels import NATIVE_WIDTH, native_runs_on

_MOST_WEIGHTS = 2**17
"""In one layer: with more, products are most of the work, and PyTorch's are as fast."""
_FEWEST_TOKENS = 1536
"""So many before weights are worth laying out anew."""


def panels_run_on(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor | None] = ()) -> bool:
    """Whether the kernels take x (…, inputs) and weights (outputs, inputs), each of its own inputs."""
    return (
        x.numel() >= _FEWEST_TOKENS * x.shape[-1]
        and all(map(_fits, weights))
        and not torch.is_autocast_enabled("cpu")
        and native_runs_on(x, *weights, *(t for t in others if t is not None))
    )


def _fits(weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    return outputs % NATIVE_WIDTH == 0 and inputs % NATIVE_WIDTH == 0 and 0 < weight.numel() <= _MOST_WEIGHTS
