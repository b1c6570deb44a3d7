"""Prefill and score sequences of any length, piece by piece in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.inference.decoder import read_piece
from gecko.inference.pieces import pieces
from gecko.inference.sampling import all_finite, finite_rows, not_finite
from gecko.models.gecko import Gecko
from gecko.ops.loss import token_cross_entropy
from gecko.state import GeckoState

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
        seen = torch.zeros(model.config.vocab_size, dtype=torch.bool, device="cpu")
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


class PromptScorer:
    """Computes ``PromptScores`` piece by piece.

    The logits of a long piece never exist at once. ``top`` is the number of most likely tokens per place.
    """

    def __init__(self, model: Gecko, top: int) -> None:
        self._head, self._top = model.head, top
        self._rows = max(1, _BLOCK // model.config.vocab_size)
        self._last: Tensor | None = None
        self._tokens: list[Tensor] = []
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def push(self, hidden: Tensor, tokens: Tensor) -> None:
        """Add a piece: inputs of the head (T, D) and tokens (T,). Raise ValueError if logits are not finite."""
        before = hidden[:-1] if self._last is None else torch.cat([self._last, hidden[:-1]])
        targets = tokens[1:] if self._last is None else tokens
        self._last = hidden[-1:]
        self._tokens.append(tokens.cpu())
        for inputs, wanted in zip(before.split(self._rows), targets.split(self._rows), strict=True):
            if len(wanted):
                self._found.append(self._score(inputs, wanted))

    def result(self) -> PromptScores:
        """Return the scores of all tokens so far."""
        none = torch.empty(0, self._top, dtype=torch.float64, device="cpu")
        first = none.flatten()[:0], none.long(), none
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
