"""The position-wise half of a block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.initialise import linear
from gecko.layers.norm import LayerNorm
from gecko.ops.swiglu import swiglu


class FeedForward(nn.Module):
    """fc2(silu(fc1 u) · fc3 u) of u = LayerNorm(x), without fc3 if not ``swiglu``, times a learned vector
    if ``ffn_scale``; the residual is the block's."""

    def __init__(self, config: GeckoConfig, layer: int) -> None:
        super().__init__()
        self.norm = LayerNorm(config)
        self.fc1 = linear(config.model_dim, config.ffn_dim, bias=False)
        self.fc2 = linear(config.ffn_dim, config.model_dim, bias=False)
        self.fc3 = linear(config.model_dim, config.ffn_dim, bias=False) if config.swiglu else None
        initial = torch.full((config.model_dim,), 0.1 * 0.5**layer)
        self.scale = nn.Parameter(initial) if config.ffn_scale else None

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        a = self.fc1(u)
        y = self.fc2(F.silu(a) if self.fc3 is None else swiglu(a, self.fc3(u)))
        return y if self.scale is None else y * self.scale
