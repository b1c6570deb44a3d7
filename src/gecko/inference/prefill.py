"""Prefill and score sequences of any length, piece by piece in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.inference.decoder import read_piece
from gecko.inference.sampling import all_finite, finite_rows, not_finite
from gecko.models.gecko import Gecko
from gecko.ops.loss import token_cross_entropy
from gecko.state import GeckoState

PIECE_TOKENS = 4096
"""Approximate number of tokens per model call: more tokens cost memory and are hardly faster."""
LEAST_PIECE = 512
"""Approximate number of tokens below which pieces are not made smaller to be read sooner."""


_BLOCK = 1 << 22
"""Approximate number of logits of a prompt that are computed at once."""


class PromptScores(NamedTuple):
    """Log-probabilities in nats of the n tokens of a prompt, given the tokens before them; the first one has none."""

    tokens: Tensor
    """(n,) int64."""
    logprobs: Tensor
    """(n − 1,) float64, of the tokens after the first."""
    top_ids: Tensor
    """(n − 1, k) int64, the most likely tokens at these places, in descending order."""
    top_logprobs: Tensor
    """(n − 1, k) float64."""


@dataclass(frozen=True)
class Prefill:
    """State of one sequence after its prompt, and the logits of its next token."""

    state: GeckoState
    """Has one row."""
    logits: Tensor
    """(V,), of the next token."""
    seen: Tensor
    """(V,) bool: the tokens of the prompt, without those that the initial state had read."""
    scores: PromptScores | None = None


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
            hidden, state = read_piece(model, part.unsqueeze(0).to(device), state)
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


class PiecePace:
    """Number of prompt tokens to read between two tokens of other sequences, by the speed of the pieces before.

    It is a whole number of attention windows: ``piece_length``, halved until reading is expected to take at most
    ``seconds``, but not below ``LEAST_PIECE``, because calls with few tokens are slow.
    """

    def __init__(self, config: GeckoConfig, seconds: float) -> None:
        window = 2 * config.chunk_size
        counts = [piece_length(config) // window]
        while counts[-1] > 1 and counts[-1] // 2 * window >= LEAST_PIECE:
            counts.append(counts[-1] // 2)
        self._sizes = [count * window for count in counts]
        self._seconds = seconds
        self._per_token: float | None = None

    @property
    def piece(self) -> int:
        """The least size before the first ``record``."""
        if self._per_token is None:
            return self._sizes[-1]
        fitting = (size for size in self._sizes if size * self._per_token <= self._seconds)
        return next(fitting, self._sizes[-1])

    def record(self, tokens: int, seconds: float) -> None:
        """Take the time into account that reading ``tokens`` took; short pieces say nothing about long ones."""
        if tokens < self._sizes[-1]:
            return
        now = seconds / tokens
        self._per_token = now if self._per_token is None else (self._per_token + now) / 2


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


class PromptScorer:
    """Computes ``PromptScores`` piece by piece. The logits of a long piece never exist at once.

    Args:
        top: number k of most likely tokens per place.
    """

    def __init__(self, model: Gecko, top: int) -> None:
        self._head, self._top = model.head, top
        self._rows = max(1, _BLOCK // model.config.vocab_size)
        self._last: Tensor | None = None
        self._tokens: list[Tensor] = []
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def push(self, hidden: Tensor, tokens: Tensor) -> None:
        """Add a piece: inputs of the head (T, D) and tokens (T,).

        Raises:
            ValueError: logits are not finite.
        """
        before = hidden[:-1] if self._last is None else torch.cat([self._last, hidden[:-1]])
        targets = tokens[1:] if self._last is None else tokens
        self._last = hidden[-1:]
        self._tokens.append(tokens.cpu())
        for inputs, wanted in zip(before.split(self._rows), targets.split(self._rows), strict=True):
            if len(wanted):
                self._found.append(self._score(inputs, wanted))

    def result(self) -> PromptScores:
        """Return the scores of all tokens so far."""
        none = torch.empty(0, dtype=torch.float64), torch.empty(0, self._top, dtype=torch.int64)
        first = *none, none[1].double()
        columns = zip(first, *self._found, strict=True)
        return PromptScores(torch.cat(self._tokens), *map(torch.cat, columns))

    def _score(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._head(inputs)
        if not all_finite(logits):
            raise ValueError(not_finite(logits[~finite_rows(logits)][0]))
        distributions = logits.double().log_softmax(-1)
        top = distributions.topk(self._top, dim=-1)
        own = distributions.gather(1, targets.unsqueeze(1)).squeeze(1)
        return own.cpu(), top.indices.cpu(), top.values.cpu()


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
