"""Prefill and score sequences of any length, piece by piece in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.ops.loss import token_cross_entropy
from gecko.state import GeckoState

PIECE_TOKENS = 4096
"""Approximate number of tokens per model call: more tokens cost memory and are hardly faster."""


@dataclass(frozen=True)
class Prefill:
    """State of one sequence after its prompt, and the logits of its next token."""

    state: GeckoState
    """Has one row."""
    logits: Tensor
    """(V,), of the next token."""
    seen: Tensor
    """(V,) bool: the tokens of the prompt, without those that the initial state had read."""


def read(
    model: Gecko, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Prefill:
    """Prefill one sequence.

    Args:
        tokens: the sequence as 1-D integer tensors of any lengths, consumed one at a time.
        state: initial state of one row; None: the start of a sequence.
        piece: tokens per model call, which affects memory and speed only; None: ``piece_length``.

    Raises:
        TypeError, ValueError: the tokens are not ids of the model, or there are none; the state belongs to another
            model or has several rows.
    """
    device = model.embedding.weight.device
    state = None if state is None else state.to(device)
    last = None
    with inference(model):
        seen = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        for part in pieces(model.config, tokens, state, piece=piece):
            seen[part] = True
            hidden, state = model.hidden(part.unsqueeze(0).to(device), state=state)
            last = hidden[:, -1:]
        if last is None or state is None:
            raise ValueError(
                "a prompt must have at least one token, also after a state: the logits of the next token come from "
                "reading the last one. Try a line break, or the document start."
            )
        return Prefill(state, model.head(last)[0, 0], seen.to(device))


def pieces(
    config: GeckoConfig, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Iterator[Tensor]:
    """Check the tokens that follow ``state`` and cut them where the position is a multiple of ``piece``.

    Raises:
        TypeError, ValueError: the state has several rows; while iterating, tokens are not ids of the model.
    """
    size = piece_length(config) if piece is None else piece
    return cut(checked(tokens, config.vocab_size), _until_border(state, size), size)


def piece_length(config: GeckoConfig) -> int:
    """Return the number of tokens per piece: whole attention windows of 2 chunks, about ``PIECE_TOKENS``."""
    window = 2 * config.chunk_size
    return window * max(1, PIECE_TOKENS // window)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Disable gradients and put ``model`` into evaluation mode; restore its mode at the end."""
    training = model.training
    if training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if training:
            model.train()


def _until_border(state: GeckoState | None, size: int) -> int:
    """Return the number of tokens to the next multiple of ``size``, so that pieces end where chunks end."""
    if state is None:
        return size
    if state.batch_size != 1:
        raise ValueError(f"state must have one row; got {state.batch_size}. Try state.rows([0]).")
    return size - state.position[0] % size


def checked(tokens: Iterable[Tensor], vocab_size: int) -> Iterator[Tensor]:
    """Yield the tokens as int64 on the host, checked there: a check on a GPU would synchronize."""
    for part in tokens:
        if part.dim() != 1 or part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
            raise TypeError(f"a prompt must be 1-D integers; got {part.dtype} of shape {tuple(part.shape)}.")
        part = part.to("cpu", torch.int64)
        wrong = part[(part < 0) | (part >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"a prompt must be ids in 0..{vocab_size - 1}; got {int(wrong[0])}. "
                "Check that the tokenizer is the one the model was trained with."
            )
        yield part


def cut(parts: Iterable[Tensor], first: int, size: int) -> Iterator[Tensor]:
    """Yield the same tokens in pieces of ``size``; the first piece has ``first`` tokens, the last one the rest."""
    held: list[Tensor] = []
    count, wanted = 0, first
    for part in parts:
        held.append(part)
        count += len(part)
        if count < wanted:
            continue
        joined = torch.cat(held)
        while len(joined) >= wanted:
            yield joined[:wanted]
            joined, wanted = joined[wanted:], size
        held, count = [joined], len(joined)
    if count:
        yield torch.cat(held)


class Scored(NamedTuple):
    """Losses of a piece of a sequence and the state after it."""

    losses: Tensor
    """(n,), cross-entropy of each token in nats; the first token of a sequence has none."""
    state: GeckoState
    """Has one row."""


def score(
    model: Gecko, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Iterator[Scored]:
    """Score one sequence piece by piece. Arguments and errors as for ``read``, but the sequence may be empty."""
    device = model.embedding.weight.device
    state = None if state is None else state.to(device)
    last = None
    for part in pieces(model.config, tokens, state, piece=piece):
        with inference(model):
            hidden, state = model.hidden(part.unsqueeze(0).to(device), state=state)
            before = hidden[0, :-1] if last is None else torch.cat([last, hidden[0, :-1]])
            targets = part[1:] if last is None else part
            losses = hidden.new_empty(0)
            if len(targets):
                losses = token_cross_entropy(before, model.head.weight, targets.to(device))
            last = hidden[0, -1:]
        yield Scored(losses, state)
