"""Pieces of prompts: tokens are checked on the host and cut where the position is a multiple of a piece's length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.state import GeckoState

PIECE_TOKENS = 4096
"""Approximate number of tokens per model call: more tokens cost memory and are hardly faster."""
LEAST_PIECE = 512
"""Approximate number of tokens below which pieces are not made smaller to be read sooner."""


def pieces(
    config: GeckoConfig, tokens: Iterable[Tensor], state: GeckoState | None = None, *, piece: int | None = None
) -> Iterator[Tensor]:
    """Check the tokens that follow ``state`` and cut them where the position is a multiple of ``piece``, as chunks end
    there. Raise ValueError if the state has several rows; while iterating, TypeError or ValueError if tokens are not
    ids of the model."""
    size = piece_length(config) if piece is None else piece
    if state is not None and state.batch_size != 1:
        raise ValueError(f"state must have one row; got {state.batch_size}. Try state.rows([0]).")
    first = size if state is None else size - state.position[0] % size
    return cut(checked(tokens, config.vocab_size), first, size)


def piece_length(config: GeckoConfig) -> int:
    """Return the number of tokens per piece: whole attention windows of 2 chunks, about ``PIECE_TOKENS``."""
    window = 2 * config.chunk_size
    return window * max(1, PIECE_TOKENS // window)


class PiecePace:
    """Number of prompt tokens to read between two tokens of other sequences, by the speed of the pieces before.

    It is a whole number of attention windows: ``piece_length``, halved until reading is expected to take at most
    ``seconds``, but not below ``LEAST_PIECE``, because calls with few tokens are slow.
    """

    def __init__(self, config: GeckoConfig, seconds: float) -> None:
        window, self._sizes, self._seconds = 2 * config.chunk_size, [piece_length(config)], seconds
        while (half := self._sizes[-1] // window // 2 * window) >= LEAST_PIECE:
            self._sizes.append(half)
        self._per_token = math.inf

    @property
    def piece(self) -> int:
        """The least size before the first ``record``."""
        fitting = (size for size in self._sizes if size * self._per_token <= self._seconds)
        return next(fitting, self._sizes[-1])

    def record(self, tokens: int, seconds: float) -> None:
        """Take the time into account that reading ``tokens`` took; short pieces say nothing about long ones."""
        if tokens >= self._sizes[-1]:
            now = seconds / tokens
            self._per_token = now if self._per_token == math.inf else (self._per_token + now) / 2


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
