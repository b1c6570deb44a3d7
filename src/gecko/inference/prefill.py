"""Prefill and score sequences of any length, piece by piece in constant memory; several prompts in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.inference.decoder import as_own, read_piece
from gecko.inference.pieces import pieces
from gecko.inference.prefix_cache import Key, PrefixCache
from gecko.inference.request import PromptScores, Request
from gecko.inference.sampling import broken_rows, not_finite
from gecko.layers.head import head_token_losses
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

MOST_TOGETHER = 16
"""Maximum number of prompts in one call. Each has its own state, and more prompts are hardly faster."""
MOST_PADDING = 0.25
"""Largest share of padding in the tokens of a call."""
_BLOCK = 1 << 22
"""Approximate number of logits of a prompt that are computed at once."""


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
    """Prefill one sequence. Raise TypeError or ValueError if the tokens are not ids of the model, or there are none, or
    the state belongs to another model or has several rows.

    Args:
        tokens: the sequence as 1-D integer tensors of any lengths, consumed one at a time.
        state: initial state of one row; None: the start of a sequence.
        piece: tokens per model call, which affects memory and speed only; None: ``piece_length``.
    """
    device = model.embedding.weight.device
    state = None if state is None else as_own(model, state)
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


def shifted(last: Tensor | None, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the head that predict the ``tokens`` of a piece, whose own are ``hidden`` (n, D), and what
    they predict. ``last`` (1, D) is that of the token before the piece; nothing predicts the first token of all."""
    return (hidden[:-1], tokens[1:]) if last is None else (torch.cat([last, hidden[:-1]]), tokens)


class PromptScorer:
    """Computes ``PromptScores`` with ``top`` tokens per place, piece by piece; not all logits of one exist at once."""

    def __init__(self, model: Gecko, top: int) -> None:
        self._head, self._top = model.head, top
        self._rows = max(1, _BLOCK // model.config.vocab_size)
        self._last: Tensor | None = None
        none = torch.empty(0, top, dtype=torch.float64, device="cpu")
        self._tokens: list[Tensor] = []
        self._found = [(none.flatten()[:0], none.long(), none)]

    def push(self, hidden: Tensor, tokens: Tensor) -> None:
        """Add a piece: inputs of the head (T, D) and tokens (T,). Raise ValueError if logits are not finite."""
        inputs, targets = shifted(self._last, hidden, tokens)
        self._last = hidden[-1:]
        self._tokens.append(tokens.cpu())
        for begin in range(0, len(targets), self._rows):
            some = slice(begin, begin + self._rows)
            logits, wanted = self._head(inputs[some]), targets[some]
            if rows := broken_rows(logits):
                raise ValueError(not_finite(logits[rows[0]]))
            distributions = logits.double().log_softmax(-1)
            top = distributions.topk(self._top, dim=-1)
            own = distributions.gather(1, wanted.unsqueeze(1)).squeeze(1)
            self._found.append((own.cpu(), top.indices.cpu(), top.values.cpu()))

    def result(self) -> PromptScores:
        """Return the scores of all tokens so far."""
        return PromptScores(torch.cat(self._tokens), *map(torch.cat, zip(*self._found, strict=True)))


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
    state = None if state is None else as_own(model, state)
    last = None
    for part in pieces(model.config, tokens, state, piece=piece):
        with inference(model):
            hidden, state = model.hidden(part.unsqueeze(0).to(device), state=state)
            inputs, targets = shifted(last, hidden[0], part)
            last, losses = hidden[0, -1:], hidden.new_empty(0)
            if len(targets):
                losses = head_token_losses(model.head, inputs, targets.to(device))
        yield Scored(losses, state)


class PromptPrefill:
    """Chunked prefill of one prompt, shared by all ``requests`` with that prompt, such as ``request``. It uses no
    ``cache`` if the request has an initial state or asks for log-probabilities of the prompt. The cache keeps a state
    at a multiple of ``piece``. ``arrival`` is the engine's step at which the request was submitted."""

    def __init__(self, request: Request, model: Gecko, cache: PrefixCache | None, piece: int, arrival: int) -> None:
        self.arrival = arrival
        self.requests: dict[int, Request] = {}
        self._request, self._model, self._piece = request, model, piece
        self._device = model.embedding.weight.device
        self._scorer = None if request.prompt_logprobs is None else PromptScorer(model, request.prompt_logprobs)
        self._cache = cache if request.state is None and self._scorer is None else None
        self._prompt = request.prompt.to("cpu", torch.int64)
        self.state: GeckoState | None = None
        """State after the tokens that are read; None at the start of a text."""
        self._logits: Tensor | None = None
        """Logits after the whole prompt, if the cache has them."""
        self.position = request.start_position
        """Tokens of the sequence that the state has read."""
        self.piece = 0
        """Tokens of the last piece."""
        self._read = self._known = 0
        self._started = False
        self._borders: Mapping[int, Key] = {}

    @property
    def reused(self) -> int:
        """Prompt tokens that were not read: from the cache, or shared with another request."""
        return self._known + (len(self.requests) - 1) * len(self._prompt)

    @property
    def remaining(self) -> int:
        """Prompt tokens that were not read yet."""
        return len(self._prompt) - self._read

    def serves(self, request: Request) -> bool:
        """Return whether ``request`` has the same prompt and initial state, and asks for the same log-probabilities."""
        own = self._request
        same = request.state is own.state and request.prompt_logprobs == own.prompt_logprobs
        if not same or len(request.prompt) != len(self._prompt):
            return False
        return request.prompt is own.prompt or torch.equal(request.prompt.to("cpu", torch.int64), self._prompt)

    def is_of_call(self, request: Request) -> bool:
        """Return whether ``request`` was made with the same tensor, as the choices of one call are."""
        return request.prompt is self._request.prompt and self.serves(request)

    def start(self) -> None:
        """Look the prompt up in the cache, to which earlier requests may have added since this one was submitted."""
        if self._started:
            return
        self._started = True
        if self._request.state is not None:
            self.state = as_own(self._model, self._request.state)
        if self._cache is None:
            return
        prefix = self._cache.find(self._model.fingerprint(), self._prompt, self._model.config.chunk_size, self._piece)
        self._borders, self.state, self._logits = prefix.borders, prefix.state, prefix.logits
        self.position = self._read = self._known = prefix.length

    @property
    def known(self) -> Prefill | None:
        """The result, if the cache has the whole prompt."""
        return None if self._logits is None or self.state is None else Prefill(self.state, self._logits, self._seen())

    def shares_beginning(self, other: PromptPrefill) -> bool:
        """Return whether reading one of both prompts first may spare a part of the other, thanks to the cache."""
        size = self._model.config.chunk_size
        if self._cache is None or other._cache is None or min(len(self._prompt), len(other._prompt)) <= size:
            return False
        return torch.equal(self._prompt[:size], other._prompt[:size])

    def tokens(self, piece: int) -> Tensor:
        """Return the tokens to read next, (n,) int64, up to the next multiple of ``piece``."""
        kept = (border for border in self._borders if border > self._read)
        end = min(len(self._prompt), self._read + piece - self.position % piece, *kept)
        return self._prompt[self._read : end].to(self._device)

    def take(self, tokens: Tensor, hidden: Tensor, state: GeckoState) -> Prefill | None:
        """Take the inputs of the head (n, D) and the state that the model returned for the next tokens (n,). Return the
        result at the end of the prompt, else None."""
        self.state, self.piece = state, len(tokens)
        self._read, self.position = self._read + self.piece, self.position + self.piece
        if self._scorer is not None:
            self._scorer.push(hidden, tokens)
        logits = None if self.remaining else self._model.head(hidden[-1])
        if self._cache is not None and self._read in self._borders:
            self._cache.keep(self._borders[self._read], state, logits)
        if logits is None:
            return None
        return Prefill(state, logits, self._seen(), None if self._scorer is None else self._scorer.result())

    def _seen(self) -> Tensor:
        seen = torch.zeros(self._model.config.vocab_size, dtype=torch.bool, device="cpu")
        return seen.index_fill_(0, self._prompt, True).to(self._device)


def together(prompts: Sequence[PromptPrefill], piece: int, budget: int) -> list[tuple[PromptPrefill, int]]:
    """Return the prompts to read in one call, each with the ``piece`` of its tokens.

    They are the first one, with its ``piece``, and others, in their order, whose rest fits beside it. All together,
    with the padding up to the longest, have at most ``budget`` tokens.
    """
    first, *others = prompts
    found, longest = [(first, piece)], len(first.tokens(piece))
    tokens = longest
    for one in others:
        if len(found) == MOST_TOGETHER or (len(found) + 1) * longest > budget:
            break
        width = max(longest, one.remaining)
        size = (len(found) + 1) * width
        fits = size <= budget and size - tokens - one.remaining <= MOST_PADDING * size
        if not fits or any(one.shares_beginning(other) for other, _ in found):
            continue
        one.start()
        if one.known is None:
            found.append((one, one.position + one.remaining))
            longest, tokens = max(longest, one.remaining), tokens + one.remaining
    return found


def read_together(model: Gecko, prompts: Sequence[tuple[PromptPrefill, int]]) -> list[Prefill | Exception | None]:
    """Read the next piece of each prompt in one call of the model.

    The result of a prompt is None unless it ends; it is an exception if the prompt cannot be read. If the call fails,
    each prompt is read by itself: the others do not fail with it.
    """
    try:
        parts = [one.tokens(piece) for one, piece in prompts]
        read_rows = _read_rows(model, parts, [one.state for one, _ in prompts])
    except Exception as error:
        return [error] if len(prompts) == 1 else [read_together(model, [one])[0] for one in prompts]
    results: list[Prefill | Exception | None] = []
    for (prompt, _), part, (hidden, state) in zip(prompts, parts, read_rows, strict=True):
        try:
            results.append(prompt.take(part, hidden, state))
        except Exception as error:
            results.append(error)
    return results


def _read_rows(
    model: Gecko, parts: Sequence[Tensor], states: Sequence[GeckoState | None]
) -> list[tuple[Tensor, GeckoState]]:
    """Return for each part (n,) the inputs of the head (n, D) and the state of one row after it."""
    if len(parts) == 1:
        hidden, after = read_piece(model, parts[0].unsqueeze(0), states[0])
        return [(hidden[0], after)]
    fresh = all(state is None for state in states)
    before = None if fresh else GeckoState.stack([model.empty_state() if x is None else x for x in states])
    lengths = torch.tensor([len(part) for part in parts], device="cpu")
    tokens = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    hidden, after = model.hidden(tokens, state=before, lengths=lengths)
    rows = (after.map(lambda x, row=row: x[row : row + 1]) for row in range(len(parts)))  # type: ignore[misc]
    return [(hidden[row, :length], state) for row, (length, state) in enumerate(zip(lengths, rows, strict=True))]
