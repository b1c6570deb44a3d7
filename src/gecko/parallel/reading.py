"""Reading one long text on several ranks: each computes its own chunks, and all know what was read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gecko.generation.reading import Reading, inference, piece_length, pieces
from gecko.model import Gecko
from gecko.parallel.context import ContextGroup
from gecko.state import GeckoState


def read_on_ranks(
    model: Gecko,
    tokens: Iterable[Tensor],
    group: ContextGroup,
    state: GeckoState | None = None,
    *,
    piece: int | None = None,
) -> Reading:
    """``gecko.generation.read`` shared by the ranks of a group: the same reading, on every rank.

    All ranks give the same text and state. Tokens that do not fill a chunk on every rank, fewer than
    ranks × chunk_size at each end, are read by all of them.

    Args:
        piece: tokens that a rank reads in one call, whole chunks; None: some whole windows. After ranks × piece
            tokens the state goes round once.

    Raises:
        TypeError, ValueError: as ``read``; ``piece`` is no multiple of the chunk size.
    """
    size, chunk = piece_length(model.config) if piece is None else piece, model.config.chunk_size
    if size < 1 or size % chunk:
        raise ValueError(f"piece must be a multiple of chunk_size = {chunk}; got {size}.")
    last, seen = None, torch.zeros(model.config.vocab_size, dtype=torch.bool)
    with inference(model):
        for part in pieces(model.config, tokens, state, piece=group.size * size):
            seen[part] = True
            for shared, some in _shares(part, 0 if state is None else state.position[0], group.size * chunk, chunk):
                last, state = _read_call(model, some, state, group if shared else None)
        if last is None or state is None:
            raise ValueError("a prompt must hold at least one token, also after a reading state.")
        return Reading(state, model.head(last)[0, 0], seen.to(last.device))


def _shares(part: Tensor, position: int, unit: int, chunk: int) -> Iterable[tuple[bool, Tensor]]:
    """``part`` up to the next chunk's start, then what divides into whole chunks on all ranks, then the rest; and
    whether the ranks share it."""
    before = min(-position % chunk, len(part))
    whole = (len(part) - before) // unit * unit
    sizes = [before, whole, len(part) - before - whole]
    shares = zip((False, True, False), part.split(sizes), strict=True)
    return [(shared, some) for shared, some in shares if len(some)]


def _read_call(
    model: Gecko, tokens: Tensor, state: GeckoState | None, group: ContextGroup | None
) -> tuple[Tensor, GeckoState]:
    """What the head projects for the last token, (1, 1, D), and the state after it."""
    columns = slice(None) if group is None else group.slice(len(tokens), model.config.chunk_size)
    part = tokens[columns].unsqueeze(0).to(model.embedding.weight.device)
    hidden, state = model.hidden(part, state=state, context=group)
    if group is None:
        return hidden[:, -1:], state
    return group.from_last([hidden[:, -1:]])[0], group.last_state(state)
