"""Linear layers: initialisation, joint calls of several layers with one input, and the feed-forward of a block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.norms import BlockRMSNorm, LayerNorm
from gecko.ops.common import from_linear
from gecko.ops.feed_forward import feed_forward, swiglu
from gecko.ops.norms import norm_adds
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


Terms = tuple[Tensor, ...]
"""Tensors whose sum is the residual stream: one, or, on a GPU, also those that the next norm adds to it."""


def is_bare(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether the layer is of one of ``kinds``, by default ``nn.Linear``, with no other forward and no hooks."""
    if type(layer) not in (kinds or (nn.Linear,)):
        return False
    # accelerate replaces forward to load offloaded weights, and ``Module.compile`` the call.
    if "forward" in vars(layer) or layer._compiled_call_impl is not None:
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not global_module_hooks()


class FeedForward(nn.Module):
    """onto + fc2(silu(fc1 u) · fc3 u) with u = LayerNorm(x), or RMSNorm(x) with ``norm="rms"``.

    There is no fc3 without ``swiglu``. With ``ffn_scale``, a learned vector multiplies the output of fc2. ``onto`` is
    the residual of the block.
    """

    def __init__(self, config: GeckoConfig, layer: int) -> None:
        super().__init__()
        self.norm = LayerNorm(config) if config.norm == "timestep" else BlockRMSNorm(config)
        self.fc1 = linear(config.model_dim, config.ffn_dim, bias=False)
        self.fc2 = linear(config.ffn_dim, config.model_dim, bias=False)
        self.fc3 = linear(config.model_dim, config.ffn_dim, bias=False) if config.swiglu else None
        initial = torch.full((config.model_dim,), 0.1 * 0.5**layer)
        self.scale = nn.Parameter(initial) if config.ffn_scale else None

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        """Return the sum, of the shape of x and onto, (B, T, D)."""
        return self.after_norm(self.norm(x), onto)

    def adds(self, x: Tensor) -> bool:
        """Return whether ``of_sum`` takes less than to add terms of the dtype of x and call the layer, and no hook of
        the layer or its norm would be left out."""
        return norm_adds(x) and is_bare(self, FeedForward) and is_bare(self.norm, LayerNorm, BlockRMSNorm)

    def of_sum(self, terms: Terms, onto: Tensor | None) -> Tensor:
        """Return the output for x, the sum of ``terms``; ``onto`` None is x."""
        u, x = self.norm.of_sum(*terms)
        return self.after_norm(u, x if onto is None else onto)

    def after_norm(self, u: Tensor, onto: Tensor) -> Tensor:
        """Return the output for the normalised input u."""
        if self.fc3 is not None and self.scale is None and all(map(is_bare, (self.fc1, self.fc2, self.fc3))):
            return feed_forward(u, self.fc1.weight, self.fc3.weight, self.fc2.weight, onto)
        hidden = F.silu(self.fc1(u)) if self.fc3 is None else swiglu(self.fc1(u), self.fc3(u))
        y = self.fc2(hidden)
        return onto + (y if self.scale is None else y * self.scale)
