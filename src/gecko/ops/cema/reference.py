"""Coefficients of CEMA from its parameters, and the step-by-step reference of its equation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gecko.ops.common import compute_dtype
from gecko.segments import Segments


@dataclass(frozen=True)
class CEMACoefficients:
    """Coefficients of one complex filter with N modes per channel; float32 or wider.

    input: p = σ(α), shape (D, N).
    log_damping: log |q| = log(1 − σ(α) σ(δ)), shape (D, N).
    angle: arg q, shape (D, N), radians.
    output: γ as (real, imaginary) pairs, shape (D, N, 2).
    """

    input: Tensor
    log_damping: Tensor
    angle: Tensor
    output: Tensor

    @classmethod
    def from_parameters(cls, alpha: Tensor, delta: Tensor, theta: Tensor, gamma: Tensor) -> CEMACoefficients:
        """Compute p = σ(α), |q| = 1 − σ(α) σ(δ), arg q = k · (2π/N) · σ(θ) for k = 1..N.

        Args:
            alpha, delta: (D, N); theta: (D,); gamma: (D, N, 2). Any float dtype; filters with a long memory (q close
                to 1) need parameters in float32.
        """
        alpha, delta, theta, gamma = (x.to(compute_dtype(x)) for x in (alpha, delta, theta, gamma))
        modes = torch.arange(1, alpha.shape[1] + 1, device=alpha.device, dtype=alpha.dtype)
        p = alpha.sigmoid()
        angle = (2 * math.pi / alpha.shape[1]) * theta.sigmoid().unsqueeze(1) * modes
        return cls(p, torch.log1p(-p * delta.sigmoid()), angle, gamma)

    def decay(self, steps: int | Tensor = 1) -> Tensor:
        """Return q^steps, complex. ``steps`` broadcasts against (D, N)."""
        return torch.polar(torch.exp(self.log_damping * steps), self.angle * steps)

    @cached_property
    def factor(self) -> Tensor:
        """q, complex (D, N): the factor of the state per step."""
        return self.decay()

    @cached_property
    def readout(self) -> Tensor:
        """(D, 2N): its product with interleaved (real, imaginary) states is Re Σ γ h."""
        return torch.view_as_real(torch.view_as_complex(self.output).conj().resolve_conj()).flatten(1)

    def powers(self, count: int) -> Tensor:
        """Return q^0 … q^(count − 1) as (D, N, count), computed by doubling: the rounding error grows with log(count),
        not with count as in exp(i · count · arg q)."""
        q = self.factor
        table, square = torch.ones_like(q).unsqueeze(-1), q.unsqueeze(-1)
        while table.shape[-1] < count:
            table = torch.cat([table, table * square], dim=-1)
            square = square * square
        return table[..., :count]


def cema_reference(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Compute h_t = q h_{t-1} + p x_t and y_t = Re Σ_k γ_k h_t, with h = 0 before the first step of a document."""
    p, q, gamma = coefficients.input, coefficients.decay(), torch.view_as_complex(coefficients.output)
    h, outputs = torch.view_as_complex(state), []
    for t, x_t in enumerate(x.unbind(1)):
        if segments.starts is not None:
            starts = torch.from_numpy(segments.starts[:, t]).to(x.device)
            h = torch.where(starts[:, None, None], 0, h)
        h = q * h + p * x_t.unsqueeze(-1)
        outputs.append((gamma * h).real.sum(-1))
    return torch.stack(outputs, dim=1), torch.view_as_real(h)
