"""Numbers too small for a float's full precision."""

from __future__ import annotations

import torch


def flush_denormals() -> bool:
    """Take numbers below 1e-38 for zero in this thread and those it starts from now on; false where a CPU cannot.

    Processors multiply them a hundred times slower than others. Saturated attention and vanishing gradients are full
    of them: at a high learning rate, a Llama of a million parameters trained five times slower.
    """
    return torch.set_flush_denormal(True)
