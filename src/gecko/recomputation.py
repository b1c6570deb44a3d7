"""Running a block whose activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

ActivationCheckpointing = Literal["none", "selective", "full"]
"""What is computed again: nothing; all but the outputs of linear layers; all."""


def run_block(mode: ActivationCheckpointing, block: nn.Module, *inputs: Any, **options: Any) -> Any:
    """``block(*inputs, **options)``, with less kept for its backward pass; without gradients nothing is kept anyway."""
    if mode == "none" or not torch.is_grad_enabled():
        return block(*inputs, **options)
    kept = _keep_projections if mode == "selective" else noop_context_fn
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=kept, **options)


_keep_projections = partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)
