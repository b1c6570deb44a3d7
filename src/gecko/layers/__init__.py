"""Layers of a block: linear layers, norms, the complex exponential moving average (CEMA) and the feed-forward.

``gated_attention`` has the mixer. Weights of norms are offsets from 1, so weight decay pulls towards the identity;
those of ``BlockRMSNorm`` are factors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import CEMASkip, GeckoConfig
from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.cema import CEMACoefficients, cema, cema_state_before
from gecko.ops.common import compute_dtype, from_linear, linear_dtype
from gecko.ops.feed_forward import feed_forward, swiglu
from gecko.ops.norms import group_layer_norm, group_rms_norm, norm_adds, norm_of_sum
from gecko.ops.projections import projections
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm, timestep_norm_state_before
from gecko.runtime.private import global_module_hooks
from gecko.segments import Pending, Segments

Terms = tuple[Tensor, ...]
"""Tensors whose sum is the residual stream: one, or, on a GPU, also those that the next norm adds to it."""


def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """Return a layer x Wᵀ + b with W ~ N(0, 1 / (3 · inputs)) and b = 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(3 * inputs))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def embedding_(weight: Tensor) -> None:
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


def is_bare(layer: nn.Module, *kinds: type[nn.Module], bias: bool = True) -> bool:
    """Return whether the layer is of one of ``kinds``, by default ``nn.Linear``, with no other forward and no hooks.
    If not ``bias``, it must have none: a caller may then read its weight and nothing else."""
    if type(layer) not in (kinds or (nn.Linear,)) or not (bias or layer.bias is None):
        return False
    # accelerate replaces forward to load offloaded weights, and ``Module.compile`` the call.
    if "forward" in vars(layer) or layer._compiled_call_impl is not None:
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not global_module_hooks()


def _offsets(features: int, present: bool = True) -> nn.Parameter | None:
    """Return zeros for the weight of a norm, stored as an offset from 1, or for its bias; None if not ``present``."""
    return nn.Parameter(torch.zeros(features)) if present else None


class TimestepNorm(nn.Module):
    """Normalisation with decaying or cumulative statistics of the document so far, per group of features.

    On a GPU the output has the dtype that linear layers read, so that CEMA moves and multiplies 16 bits under autocast.
    C kernels read float32.
    """

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        eps = config.timestep_eps or config.norm_eps
        self.statistics = Statistics(config.timestep_groups, config.timestep_betas, eps)
        self.weight, self.bias = _offsets(config.model_dim), _offsets(config.model_dim)

    def forward(
        self, x: Tensor, state: TimestepNormState | None, segments: Segments
    ) -> tuple[Tensor, TimestepNormState]:
        before = timestep_norm_state_before(x, self.statistics, state, segments)
        return timestep_norm(
            x, self.weight, self.bias, self.statistics, before, segments=segments,
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
        weight = self.weight
        return None if weight is None else weight.to(torch.promote_types(weight.dtype, torch.float32)) - 1


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


class CEMA(nn.Module):
    """CEMA(x) + x, or Megalodon's CEMA(x) + ω x with γ scaled by 1/√N (``skip="learned"``). Mode k reads β_k x with
    ``expansion``.

    γ is stored as (real, imaginary) pairs, because optimizers and sharding support only real tensors.
    """

    def __init__(self, model_dim: int, modes: int, skip: CEMASkip, *, expansion: bool = False) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(model_dim, modes))
        self.delta = nn.Parameter(torch.empty(model_dim, modes))
        self.theta = nn.Parameter(torch.empty(model_dim))
        self.gamma = nn.Parameter(torch.empty(model_dim, modes, 2))
        self.omega = nn.Parameter(torch.empty(model_dim)) if skip == "learned" else None
        self.beta = nn.Parameter(torch.ones(model_dim, modes)) if expansion else None
        if not self.alpha.is_meta:  # there are values; PyTorch would import its compiler to compute them on meta
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw α, δ ~ N(0, 0.2²); σ(θ) is D^(−i/D) in random order; γ is real, with variance 1/N after its scaling."""
        model_dim, modes = self.alpha.shape
        nn.init.normal_(self.alpha, std=0.2)
        nn.init.normal_(self.delta, std=0.2)
        steps = torch.randperm(model_dim, device=self.theta.device) + 1
        self.theta.copy_(torch.logit(float(model_dim) ** (-steps.double() / model_dim)))
        nn.init.zeros_(self.gamma)
        nn.init.normal_(self.gamma[..., 0], std=1.0 if self.omega is not None else 1 / math.sqrt(modes))
        if self.omega is not None:
            nn.init.trunc_normal_(self.omega, std=0.25, a=-1.0, b=1.0)

    def before(self, x: Tensor, state: Tensor | None, segments: Segments) -> Pending[Tensor | None]:
        """Return the state before x, for ``forward``; ``state`` is that before the call."""
        return cema_state_before(x, self.coefficients, state, segments)

    def forward(self, x: Tensor, before: Pending[Tensor | None], segments: Segments) -> tuple[Tensor, Tensor]:
        """Return y of the shape of x, (B, T, D), and the state after the last token, (B, D, N, 2)."""
        size, dtype = x.shape[-1], compute_dtype(x)
        skip: Tensor | None = self.omega
        if skip is None:
            skip = segments.once(("ones", size, dtype, x.device), lambda: x.new_ones(size, dtype=dtype))
        return cema(x, self.coefficients(), before(), segments=segments, skip=skip)

    def coefficients(self) -> CEMACoefficients:
        """Return the filter's coefficients for the current parameters."""
        gamma = self.gamma.to(compute_dtype(self.gamma))  # before the factor, which 16 bits would round again
        gamma = gamma if self.omega is None else gamma / math.sqrt(gamma.shape[1])
        found = CEMACoefficients.from_parameters(self.alpha, self.delta, self.theta, gamma)
        return found if self.beta is None else replace(found, input=found.input * self.beta)


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
        return self._after_norm(self.norm(x), onto)

    def adds(self, x: Tensor) -> bool:
        """Return whether ``of_sum`` takes less than to add terms of the dtype of x and call the layer, and no hook of
        the layer or its norm would be left out."""
        return norm_adds(x) and is_bare(self, FeedForward) and is_bare(self.norm, LayerNorm, BlockRMSNorm)

    def of_sum(self, terms: Terms, onto: Tensor | None) -> Tensor:
        """Return the output for x, the sum of ``terms``; ``onto`` None is x."""
        u, x = self.norm.of_sum(*terms)
        return self._after_norm(u, x if onto is None else onto)

    def _after_norm(self, u: Tensor, onto: Tensor) -> Tensor:
        plain = all(is_bare(x, bias=False) for x in self.children() if x is not self.norm)
        if self.fc3 is not None and self.scale is None and plain:
            return feed_forward(u, self.fc1.weight, self.fc3.weight, self.fc2.weight, onto)
        hidden = F.silu(self.fc1(u)) if self.fc3 is None else swiglu(self.fc1(u), self.fc3(u))
        y = self.fc2(hidden)
        return onto + (y if self.scale is None else y * self.scale)
