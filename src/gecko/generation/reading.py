"""Reading a prompt of any length in pieces, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.model import Gecko
from gecko.state import GeckoState

PIECE_TOKENS = 4096
"""About how many tokens are read in one call: beyond it, speed hardly grows and memory does."""


@dataclass(frozen=True)
class Reading:
    """Where one text stands: what was read, and what may come next."""

    state: GeckoState
    """Of one row."""
    logits: Tensor
    """(V,) of the token that follows."""
    seen: Tensor
    """(V,) bool: the tokens that were read in the call, whatever the state had read before."""


def read(
    model: Gecko, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Reading:
    """Read one text to its end.

    Args:
        tokens: the text as 1-D integer tensors of any lengths, taken one at a time.
        state: of one row, what was read before; None: nothing.
        piece: tokens read in one call, which changes memory and speed only; None: some whole windows.

    Raises:
        TypeError, ValueError: tokens that are no ids of the model, no token at all, a state of another model
            or of several rows.
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
                "a prompt must hold at least one token, also after a reading state: the state knows what was read, "
                "and the next token's logits come from reading one more. Try a line break, or the document start."
            )
        return Reading(state, model.head(last)[0, 0], seen.to(device))


def pieces(
    config: GeckoConfig, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Iterator[Tensor]:
    """The tokens of a text after ``state``, as they are read: checked, and cut at multiples of ``piece``.

    Raises:
        TypeError, ValueError: a state of several rows; while iterating, tokens that are no ids of the model.
    """
    size = piece_length(config) if piece is None else piece
    return cut(checked(tokens, config.vocab_size), _until_border(state, size), size)


def piece_length(config: GeckoConfig) -> int:
    """Tokens of a piece: whole attention windows of 2 chunks, about ``PIECE_TOKENS``."""
    window = 2 * config.chunk_size
    return window * max(1, PIECE_TOKENS // window)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients, and ``model`` in evaluation mode; it returns to the mode it was in."""
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
    """Tokens to the next multiple of ``size``, so that pieces end where chunks end and no chunk is computed twice."""
    if state is None:
        return size
    if state.batch_size != 1:
        raise ValueError(f"a text is continued from a state of one row; got {state.batch_size}. Try state.rows([0]).")
    return size - state.position[0] % size


def checked(tokens: Iterable[Tensor], vocab_size: int) -> Iterator[Tensor]:
    """Checked here on the host; on other devices the model cannot look at ids without waiting."""
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
    """The same tokens in pieces of ``size``, the first one of ``first``, the last one as long as it comes."""
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
