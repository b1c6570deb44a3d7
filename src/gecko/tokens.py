"""Ids of tokens as models take them, and which of them are trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from gecko.ops.loss import IGNORED


def check_tokens(name: str, tokens: Tensor, vocab_size: int, *, ignored: bool = False) -> None:
    """TypeError or ValueError for what are no ids (B, T) of a vocabulary; ``ignored``: −100 may be among them."""
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"{name} must be integers; got {tokens.dtype}. Use tokens.long() if they are token ids.")
    if tokens.dim() != 2 or tokens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch, length), both at least 1; got {tuple(tokens.shape)}.")
    if tokens.device.type == "cpu":
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
    """``targets`` (B, T) with −100 for the last token of every document: none is trained on the start of the next.

    Args:
        next_begins: (B,) bool, whether a document starts after the last token; None: the row ends there.
    """
    if targets.shape != tokens.shape:
        raise ValueError(f"targets must have the tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}.")
    targets = targets.long()
    if segment_ids is None:
        return targets
    next_document = segment_ids[:, 1:] != segment_ids[:, :-1]
    last = next_document.new_zeros(len(targets), 1) if next_begins is None else next_begins.unsqueeze(1)
    ends = torch.cat([next_document, last.to(next_document.device)], dim=1)
    return targets.masked_fill(ends.to(targets.device), IGNORED)
