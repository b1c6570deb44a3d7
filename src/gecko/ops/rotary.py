"""Rotary position embedding by local position.

Scores depend only on differences of positions, and a query sees at most the previous chunk. So keys are rotated by
their position inside their own chunk, and additionally by −c if seen from the next chunk. Positions stay below 2c, so
scores are equally precise anywhere in the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.runtime.tensors import to_device


def rotary_frequencies(head_dim: int, base: float) -> Tensor:
    """Return the angles of one step, base^(−2j / head_dim), (head_dim / 2,) float64 on the CPU."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)


def rotary_phases(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return exp(i · position · frequency) as complex numbers (…, head_dim / 2), for positions (…).

    Angles are computed in float64; only the result is rounded to ``dtype``. ONNX has no complex numbers: while the
    model is exported, the result has pairs (cos, sin) instead, (…, head_dim / 2, 2).
    """
    angles = positions.to("cpu", torch.float64).unsqueeze(-1) * frequencies
    if torch.compiler.is_exporting():
        return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device, dtype)
    phases = torch.polar(torch.ones_like(angles), angles)
    return to_device(phases.to(torch.complex128 if dtype == torch.float64 else torch.complex64), device)


def rotate(x: Tensor, phases: Tensor, heads: int) -> Tensor:
    """Rotate the interleaved pairs (2j, 2j + 1), as complex numbers, of the first ``heads`` heads.

    Args:
        x: (B, H, T, head_dim), float32 or float64; phases broadcast against (B, H, T, head_dim / 2).
    """
    if heads == 0:
        return x
    if torch.compiler.is_exporting():
        (a, b), (cos, sin) = x[:, :heads].unflatten(-1, (-1, 2)).unbind(-1), phases.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return turned if heads == x.shape[1] else torch.cat([turned, x[:, heads:]], dim=1)
    *steps, step = x.stride()
    if step != 1 or any(each % 2 for each in (*steps, x.storage_offset())):  # else view_as_complex finds no pairs
        x = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x[:, :heads].unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * phases).flatten(-2)
    return turned if heads == x.shape[1] else torch.cat([turned, x[:, heads:]], dim=1)
