"""Linear layers: initialisation, and joint calls of several layers with one input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gecko.ops.common import from_linear
from gecko.ops.projections import projections
from gecko.runtime.private import global_module_hooks


def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """Return a layer x Wᵀ + b with W ~ N(0, 1 / (3 · inputs)) and b = 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(3 * inputs))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def embedding_(weight: torch.Tensor) -> None:
    """Fill ``weight`` in place from N(0, 1 / D), truncated at three standard deviations."""
    std = 1 / math.sqrt(weight.shape[1])
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def offsets(features: int, present: bool) -> nn.Parameter | None:
    """Return zeros for the weight of a norm, stored as an offset from 1, or for its bias; None if not ``present``."""
    return nn.Parameter(torch.zeros(features)) if present else None


def project(x: Tensor, *layers: nn.Linear, onto: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the output of each layer for x; ``onto`` is added to the last one.

    Layers with hooks and layers of other classes (adapters, parametrisations) are called as modules.
    """
    if all(map(is_bare, layers)):
        return projections(x, [layer.weight for layer in layers], [layer.bias for layer in layers], onto)
    outputs = [from_linear(layer(x), x) for layer in layers]
    if onto is not None:
        outputs[-1] = onto + outputs[-1]
    return tuple(outputs)


def is_bare(layer: nn.Linear) -> bool:
    """Return whether weight and bias define the layer: a plain ``nn.Linear`` without hooks."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):  # accelerate replaces it to load offloaded weights
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not global_module_hooks()
