"""How a call lies on the grid of attention chunks, as the memory sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.phases import padded
from gecko.segments import Segments


@dataclass(frozen=True)
class Grid:
    """n chunks, the first of which holds ``phase`` tokens of earlier calls, the last maybe ``empty`` places.

    whole: every place holds a token that is counted.
    counted: (B, 1, n, c, 1) bool, tokens of the call that belong to the last document of their chunk so far.
    allowed: (B, 1, n, c, 1) bool, tokens whose document began before the previous chunk: they may read.
    resets: (B, n) bool, the document at the chunk's end (so far) began in it.
    continues: (B,) bool, the document at the end of the first chunk began before the call.
    """

    phase: int
    chunks: int
    empty: int
    whole: bool
    counted: Tensor
    allowed: Tensor
    resets: Tensor
    continues: Tensor

    @classmethod
    def build(cls, segments: Segments, phase: int, chunk_size: int) -> Grid:
        length = segments.length
        chunks = -(-(phase + length) // chunk_size)
        empty = chunks * chunk_size - phase - length
        starts = segments.document_starts - (segments.clock.position - phase).unsqueeze(1)
        last = ((torch.arange(chunks) + 1) * chunk_size - phase).clamp(max=length) - 1
        last_start = starts[:, last]
        place = phase + torch.arange(length)
        chunk = place // chunk_size
        counted = place >= last_start[:, chunk]
        allowed = starts < (chunk - 1) * chunk_size

        def on_grid(mask: Tensor) -> Tensor:
            padded = F.pad(mask, (phase, empty)).unflatten(1, (chunks, chunk_size))
            return padded[:, None, :, :, None].to(segments.device)

        resets = last_start >= torch.arange(chunks) * chunk_size
        continues = last_start[:, 0] < phase
        return cls(
            phase, chunks, empty, bool(counted.all()) and phase == empty == 0, on_grid(counted), on_grid(allowed),
            resets.to(segments.device), continues.to(segments.device),
        )  # fmt: skip

    def lay(self, x: Tensor) -> Tensor:
        """(B, H, T, d) to (B, H, n, c, d)."""
        return padded(x, self.phase, self.empty).unflatten(2, (self.chunks, -1))
