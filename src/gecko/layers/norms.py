"""Norms as layers. Weights are stored as offsets from 1: zero is identity, and decay pulls towards it."""

from __future__ import annotations

from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.initialise import offsets
from gecko.ops.dtypes import linear_dtype
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.timestep_norm import TimestepNormState, timestep_norm
from gecko.segments import Segments


class TimestepNorm(nn.Module):
    """Normalise by statistics over the document so far, decaying or cumulative."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.groups, self.betas, self.eps = config.timestep_groups, config.timestep_betas, config.norm_eps
        self.weight = offsets(config.model_dim, True)
        self.bias = offsets(config.model_dim, True)

    def forward(
        self, x: Tensor, state: TimestepNormState | None, segments: Segments
    ) -> tuple[Tensor, TimestepNormState]:
        return timestep_norm(x, self.weight, self.bias, self.groups, self.betas, self.eps, state, segments=segments)


class RMSNorm(nn.Module):
    """x / root mean square over each group of features, with a weight, for linear layers to read: in their dtype."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.groups, self.eps = config.norm_groups, config.norm_eps
        self.weight = offsets(config.model_dim, config.norm_affine)

    def forward(self, x: Tensor) -> Tensor:
        return group_rms_norm(x, self.weight, self.groups, self.eps, linear_dtype(x))


class LayerNorm(nn.Module):
    """Mean zero, variance one over each group of features, with weight and bias, for linear layers to read: in their
    dtype."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.groups, self.eps = config.norm_groups, config.norm_eps
        self.weight = offsets(config.model_dim, config.norm_affine)
        self.bias = offsets(config.model_dim, config.norm_affine)

    def forward(self, x: Tensor) -> Tensor:
        return group_layer_norm(x, self.weight, self.bias, self.groups, self.eps, linear_dtype(x))
