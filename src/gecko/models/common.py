"""Parts of every architecture: the check of tokens, the choice of targets, and activation checkpointing."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from gecko.ops.loss import IGNORED
from gecko.runtime.tensors import to_device
from gecko.segments import ContextExchange


def check_tokens(name: str, tokens: Tensor, vocab_size: int, *, ignored: bool = False) -> None:
    """Raise TypeError or ValueError unless ``tokens`` are ids (B, T) of a vocabulary; ``ignored`` also allows −100."""
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"{name} must be integers; got {tokens.dtype}. Use tokens.long() if they are token ids.")
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch, length), both at least 1; got {tuple(tokens.shape)}.")
    if tokens.device.type == "cpu" and not torch.compiler.is_exporting():  # which knows shapes but no values
        wrong = (tokens < 0) | (tokens >= vocab_size)
        wrong &= (tokens != IGNORED) if ignored else True
        if bool(wrong.any()):
            raise ValueError(
                f"{name} must be ids in 0..{vocab_size - 1}; got {int(tokens[wrong][0])}. "
                "Check that the tokenizer is the one the model was trained with."
            )


def trained_targets(
    tokens: Tensor, targets: Tensor, segment_ids: Tensor | None, next_begins: Tensor | None = None
) -> Tensor:
    """Return ``targets`` (B, T) with −100 at the last token of every document.

    A document is therefore never trained on the start of the next one.

    Args:
        next_begins: (B,) bool, whether a document starts after the last token. None: no document starts there.
    """
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have the tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}.")
    targets = targets.long()
    if segment_ids is None:
        return targets
    next_document = segment_ids[:, 1:] != segment_ids[:, :-1]
    last = next_document.new_zeros(len(targets), 1) if next_begins is None else next_begins.unsqueeze(1)
    ends = torch.cat([next_document, last.to(next_document.device)], dim=1)
    return targets.masked_fill(to_device(ends, targets.device), IGNORED)


ActivationCheckpointing = Literal["none", "selective", "full"]
"""Activations that backward recomputes: none, all except the outputs of linear layers, or all."""


def run_block(
    mode: ActivationCheckpointing, block: nn.Module, *inputs: Any, exchange: ContextExchange | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return ``block(*inputs, **options)``. With gradients, backward recomputes the activations given by ``mode``.

    What arrives from other ranks through ``exchange`` is kept: the recomputation does not communicate.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(*inputs, **options)
    kept = _keep_projections if mode == "selective" else noop_context_fn
    kept = kept if exchange is None else exchange.keeping(kept)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=kept, **options)


_keep_projections = partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)
