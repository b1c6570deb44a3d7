"""Reference of the short convolution, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.segments import Segments


def short_convolution_reference(x: Tensor, taps: Tensor, state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Compute ``short_convolution`` step by step, one row at a time."""
    weights, outputs, states = taps.softmax(-1), [], []
    for row in range(segments.batch):
        begin, held = int(segments.clock.position[row]), list(state[row].unbind(0))
        found = []
        for t, step in enumerate(x[row].unbind(0)):
            read = begin + t - int(segments.document_starts[row, t])  # steps of the document before this one
            held = [old if len(held) - i <= read else torch.zeros_like(old) for i, old in enumerate(held)]
            window = [*held, step]
            found.append(sum((weights[:, i] * old for i, old in enumerate(window)), torch.zeros_like(step)))
            held = window[1:]
        outputs.append(torch.stack(found))
        states.append(torch.stack(held) if held else state[row])
    return torch.stack(outputs), torch.stack(states)
