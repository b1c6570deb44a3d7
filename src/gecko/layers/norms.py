"""Norm layers. Weights are offsets from 1, so weight decay pulls towards the identity; ``BlockRMSNorm`` has factors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.common import linear_dtype
from gecko.ops.norms import group_layer_norm, group_rms_norm, norm_of_sum
from gecko.ops.timestep_norm import TimestepNormState, timestep_norm, timestep_norm_state_before
from gecko.segments import Segments


def _offsets(features: int, present: bool) -> nn.Parameter | None:
    """Return zeros for the weight of a norm, stored as an offset from 1, or for its bias; None if not ``present``."""
    return nn.Parameter(torch.zeros(features)) if present else None


class TimestepNorm(nn.Module):
    """Normalisation with decaying or cumulative statistics of the document so far, per group of features.

    On a GPU the output has the dtype that linear layers read, so that CEMA moves and multiplies 16 bits under autocast.
    C kernels read float32.
    """

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.groups, self.betas = config.timestep_groups, config.timestep_betas
        self.eps = config.timestep_eps or config.norm_eps
        self.weight = _offsets(config.model_dim, True)
        self.bias = _offsets(config.model_dim, True)

    def forward(
        self, x: Tensor, state: TimestepNormState | None, segments: Segments
    ) -> tuple[Tensor, TimestepNormState]:
        before = timestep_norm_state_before(x, self.groups, self.betas, self.eps, state, segments)
        return timestep_norm(
            x, self.weight, self.bias, self.groups, self.betas, self.eps, before, segments=segments,
            dtype=linear_dtype(x) if choose_backend(x, cpu=False) == "triton" else x.dtype,
        )  # fmt: skip


class RMSNorm(nn.Module):
    """RMS norm over each group of features, with a weight. The output has the dtype that linear layers read.

    ``features`` and ``groups`` are by default ``model_dim`` and ``norm_groups``.
    """

    def __init__(self, config: GeckoConfig, features: int | None = None, groups: int | None = None) -> None:
        super().__init__()
        self.groups, self.eps = groups or config.norm_groups, config.rms_eps or config.norm_eps
        self.weight = _offsets(features or config.model_dim, config.norm_affine)

    def forward(self, x: Tensor) -> Tensor:
        return group_rms_norm(x, self.offset(), self.groups, self.eps, linear_dtype(x))

    def offset(self) -> Tensor | None:
        """Return what is added to 1 to make the factor of every feature."""
        return self.weight


class BlockRMSNorm(RMSNorm):
    """RMS norm of ``norm="rms"``. Its weight is the factor itself: those of Llamas are small, and would keep few digits
    in 16 bits as offsets from 1."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def of_sum(self, *terms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of ``terms``, and the sum."""
        return norm_of_sum(terms, self.offset(), None, self.groups, self.eps, False, linear_dtype(terms[0]))

    def offset(self) -> Tensor | None:
        return (
            None if self.weight is None else self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) - 1
        )


class StepRMSNorm(BlockRMSNorm):
    """RMS norm of single steps in the place of a ``TimestepNorm``: it has no state."""

    def forward(self, x: Tensor, state: None, segments: Segments) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def block_norm(config: GeckoConfig) -> TimestepNorm | StepRMSNorm:
    """Return the norm of a mixer's input, or of the head's."""
    return TimestepNorm(config) if config.norm == "timestep" else StepRMSNorm(config)


class LayerNorm(nn.Module):
    """Layer norm over each group of features, with weight and bias. The output dtype is as in ``RMSNorm``."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.groups, self.eps = config.norm_groups, config.norm_eps
        self.weight = _offsets(config.model_dim, config.norm_affine)
        self.bias = _offsets(config.model_dim, config.norm_affine)

    def forward(self, x: Tensor) -> Tensor:
        return group_layer_norm(x, self.weight, self.bias, self.groups, self.eps, linear_dtype(x))

    def of_sum(self, *terms: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of ``terms``, and the sum."""
        return norm_of_sum(terms, self.weight, self.bias, self.groups, self.eps, True, linear_dtype(terms[0]))
