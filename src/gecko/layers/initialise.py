"""How parameters start."""

from __future__ import annotations

import math

import torch
from torch import nn


def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """x Wᵀ + b with W ~ N(0, 1 / (3 · inputs)) and b = 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(3 * inputs))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def embedding_(weight: torch.Tensor) -> None:
    """N(0, 1 / D) cut at three standard deviations, in place."""
    std = 1 / math.sqrt(weight.shape[1])
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def offsets(features: int, present: bool) -> nn.Parameter | None:
    """Zeros: a norm's weight as an offset from 1, or its bias."""
    return nn.Parameter(torch.zeros(features)) if present else None
