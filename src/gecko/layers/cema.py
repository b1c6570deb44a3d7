"""Layer of the complex exponential moving average (CEMA): its parameters and its skip connection."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from gecko.config import CEMASkip
from gecko.ops.cema import CEMACoefficients, cema, cema_state_before
from gecko.ops.common import compute_dtype
from gecko.segments import Pending, Segments


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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw α, δ ~ N(0, 0.2²); σ(θ) is D^(−i/D) in random order; γ is real, with variance 1/N after its scaling."""
        if self.alpha.is_meta:  # there are no values; PyTorch would import its compiler to compute them
            return
        model_dim, modes = self.alpha.shape
        nn.init.normal_(self.alpha, std=0.2)
        nn.init.normal_(self.delta, std=0.2)
        steps = torch.randperm(model_dim, device=self.theta.device) + 1
        with torch.no_grad():
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
        return cema(x, self.coefficients(), before.wait(), segments=segments, skip=skip)

    def coefficients(self) -> CEMACoefficients:
        """Return the filter's coefficients for the current parameters."""
        gamma = self.gamma if self.omega is None else self.gamma / math.sqrt(self.gamma.shape[1])
        found = CEMACoefficients.from_parameters(self.alpha, self.delta, self.theta, gamma)
        return found if self.beta is None else replace(found, input=found.input * self.beta)
