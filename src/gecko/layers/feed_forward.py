"""Feed-forward layer, the second half of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.linear import is_bare, linear
from gecko.layers.norms import BlockRMSNorm, LayerNorm
from gecko.ops.feed_forward import feed_forward, swiglu


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
        u = self.norm(x)
        if self.fc3 is not None and self.scale is None and all(map(is_bare, (self.fc1, self.fc2, self.fc3))):
            return feed_forward(u, self.fc1.weight, self.fc3.weight, self.fc2.weight, onto)
        hidden = F.silu(self.fc1(u)) if self.fc3 is None else swiglu(self.fc1(u), self.fc3(u))
        y = self.fc2(hidden)
        return onto + (y if self.scale is None else y * self.scale)
