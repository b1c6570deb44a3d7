"""CEMA step by step, as the equation reads."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.segments import Segments


def cema_reference(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """h_t = q h_{t-1} + p x_t, y_t = Re Σ_k γ_k h_t, with h = 0 before a document's first step."""
    p, q, gamma = coefficients.input, coefficients.decay(), torch.view_as_complex(coefficients.output)
    h, outputs = torch.view_as_complex(state), []
    for t, x_t in enumerate(x.unbind(1)):
        if segments.starts is not None:
            starts = torch.from_numpy(segments.starts[:, t]).to(x.device)
            h = torch.where(starts[:, None, None], 0, h)
        h = q * h + p * x_t.unsqueeze(-1)
        outputs.append((gamma * h).real.sum(-1))
    return torch.stack(outputs, dim=1), torch.view_as_real(h)
