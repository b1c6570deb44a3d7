"""When the C kernels run whose weights a core's cache holds (``native_panels.h``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gecko.ops.kernels import NATIVE_WIDTH, native_runs_on, products_are_rounded
from gecko.ops.linear import onednn_is_faster

_MOST_WEIGHTS = 2**17
"""In one layer: with more, products are most of the work, and PyTorch's are as fast …"""
_MOST_ON_AMD = 2**19
"""… where MKL's are."""
_FEWEST_TOKENS = 1536
"""So many before weights are worth laying out anew."""


def panels_run_on(
    x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor | None] = (), fills_outputs: bool = False
) -> bool:
    """Whether the kernels take x (…, inputs) and weights (outputs, inputs), each of its own inputs. A kernel that
    ``fills_outputs`` up to whole registers takes any number of them."""
    return (
        x.numel() >= _FEWEST_TOKENS * x.shape[-1]
        and native_runs_on(x, *weights, *(t for t in others if t is not None))  # not while it is traced: first of all
        and torch.is_autocast_enabled("cpu") == products_are_rounded()
        and all(_fits(weight, fills_outputs) for weight in weights)
    )


def _fits(weight: Tensor, fills_outputs: bool) -> bool:
    """Whether sizes are multiples of the numbers, or pairs, that a register holds."""
    width = 2 * NATIVE_WIDTH if products_are_rounded() else NATIVE_WIDTH
    outputs, inputs = weight.shape
    return (fills_outputs or outputs % width == 0) and inputs % width == 0 and 0 < weight.numel() <= _most_weights()


@cache
def _most_weights() -> int:
    return _MOST_ON_AMD if onednn_is_faster() else _MOST_WEIGHTS
