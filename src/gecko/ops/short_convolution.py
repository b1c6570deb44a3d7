"""Short causal convolution of every channel, as in the authors' later models; it does not cross document starts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gecko.ops.common import check_shape, compute_dtype, full_precision, layout_of_call, run_by_length
from gecko.runtime.tensors import to_device
from gecko.segments import Segments


def short_convolution(
    x: Tensor, taps: Tensor, state: Tensor | None = None, *, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Compute y_t = Σ_l softmax(taps)_{W−1−l} x_{t−l} over the lags l < W inside the document of step t.

    The softmax is over the W taps of a channel. Lags before the document's start add nothing, and the other taps are
    not rescaled.

    Args:
        x: (B, T, C); taps: (C, W), of which the last multiplies the current step.
        state: (B, W − 1, C), the steps before the call; None: zeros.

    Returns:
        y in the shape and dtype of x, and the state after the last step, zero before the start of its document.
    """
    batch, length, channels = x.shape
    check_shape("taps", taps, (channels, taps.shape[-1]))
    lags = taps.shape[1] - 1
    state = x.new_zeros(batch, lags, channels, dtype=compute_dtype(x)) if state is None else state
    check_shape("state", state, (batch, lags, channels))
    segments = layout_of_call(segments, batch, length, x.device)
    with full_precision(x):
        if segments.ends is not None:
            return run_by_length(partial(short_convolution, taps=taps), (x,), state, segments)
        wide = x.to(compute_dtype(x))
        steps = torch.cat([state.to(wide.dtype), wide], dim=1)
        weights = taps.to(wide.dtype).softmax(-1)
        begun = _steps_in_document(segments, lags)
        y = wide * weights[:, lags]
        for lag in range(1, lags + 1):
            shifted = steps[:, lags - lag : lags - lag + length] * weights[:, lags - lag]
            y = y + (shifted if begun is None else shifted * (begun > lag).unsqueeze(-1))
        last = steps[:, length:]
        if begun is not None:
            number = torch.arange(lags, 0, -1, device=x.device)
            last = last * (begun[:, -1:] >= number).unsqueeze(-1)
        return y.to(x.dtype), last


def _steps_in_document(segments: Segments, most: int) -> Tensor | None:
    """Return the number of steps of the document up to each step, at most ``most`` + 1, (B, T); None if all documents
    began at least ``most`` steps before the call."""
    read = segments.clock.position - segments.clock.document_start
    if segments.starts is None and not torch.compiler.is_exporting() and bool((read >= most).all()):
        return None

    def build(given: Segments) -> Tensor:
        position = given.clock.position[:, None] + torch.arange(given.length, device="cpu")
        return to_device((position - given.document_starts + 1).clamp(max=most + 1), given.device)

    return segments.shared(("steps in document", most), build)
