"""Prompts that are read piece by piece, several of them in one call of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gecko.inference.decoder import read_piece
from gecko.inference.prefill import Prefill, PromptScorer
from gecko.inference.prefix_cache import Key, PrefixCache
from gecko.inference.request import Request
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

MOST_TOGETHER = 16
"""Maximum number of prompts in one call. Each has its own state, and more prompts are hardly faster."""
MOST_PADDING = 0.25
"""Largest share of padding in the tokens of a call."""


class PromptPrefill:
    """Chunked prefill of one prompt, shared by all requests with that prompt.

    Args:
        request: one of the requests; gives the prompt and the initial state.
        cache: cached states of prefixes; not used if the request has an initial state or asks for log-probabilities of
            the prompt.
        piece: tokens read at once when no sequence is decoding; the cache keeps a state at a multiple of it.
        arrival: the engine's step at which the request was submitted.
    """

    def __init__(self, request: Request, model: Gecko, cache: PrefixCache | None, piece: int, arrival: int) -> None:
        self.arrival = arrival
        self.requests: dict[int, Request] = {}
        """The requests that share the prefill, by id."""
        self._model, self._piece, self._initial_state = model, piece, request.state
        self._device = model.embedding.weight.device
        self._scorer = None if request.prompt_logprobs is None else PromptScorer(model, request.prompt_logprobs)
        self._top = request.prompt_logprobs
        self._cache = cache if request.state is None and self._scorer is None else None
        self._given, self._prompt = request.prompt, request.prompt.to("cpu", torch.int64)
        self.state: GeckoState | None = None
        """State after the tokens that are read; None at the start of a text."""
        self._logits: Tensor | None = None
        """Logits after the whole prompt, if the cache has them."""
        self.position = request.start_position
        """Tokens of the sequence that the state has read."""
        self.piece = 0
        """Number of tokens that were read last."""
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
        if request.state is not self._initial_state or len(request.prompt) != len(self._prompt):
            return False
        if request.prompt_logprobs != self._top:
            return False
        return request.prompt is self._given or torch.equal(request.prompt.to("cpu", torch.int64), self._prompt)

    def is_of_call(self, request: Request) -> bool:
        """Return whether ``request`` was made with the same tensor, as the choices of one call are."""
        return request.prompt is self._given and self.serves(request)

    def start(self) -> None:
        """Look the prompt up in the cache, to which earlier requests may have added since this one was submitted."""
        if self._started:
            return
        self._started = True
        if self._initial_state is not None:
            self.state = self._initial_state.to(self._device)
        if self._cache is None:
            return
        prefix = self._cache.find(self._model.fingerprint(), self._prompt, self._model.config.chunk_size, self._piece)
        self._borders = prefix.borders
        if prefix.state is not None:
            self.state, self._logits = prefix.state, prefix.logits
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
        """Take the inputs of the head (n, D) and the state that the model returned for the next tokens (n,).

        Returns:
            The result at the end of the prompt, else None.
        """
        self.state, self.piece = state, len(tokens)
        self._read, self.position = self._read + self.piece, self.position + self.piece
        if self._scorer is not None:
            self._scorer.push(hidden, tokens)
        logits = None if self._read < len(self._prompt) else self._model.head(hidden[-1])
        if self._cache is not None and self._read in self._borders:
            self._cache.keep(self._borders[self._read], state, logits)
        if logits is None:
            return None
        scores = None if self._scorer is None else self._scorer.result()
        return Prefill(state, logits, self._seen(), scores)

    def _seen(self) -> Tensor:
        seen = torch.zeros(self._model.config.vocab_size, dtype=torch.bool, device="cpu")
        return seen.index_fill_(0, self._prompt, True).to(self._device)


def together(prompts: Sequence[PromptPrefill], piece: int, budget: int) -> list[tuple[PromptPrefill, int]]:
    """Return the prompts to read in one call, each with the ``piece`` of its tokens.

    They are the first one and others, in their order, whose rest fits beside it. All together, with the padding up to
    the longest, have at most ``budget`` tokens.

    Args:
        piece: that of the first prompt.
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
        hidden, states = _read_rows(model, parts, [one.state for one, _ in prompts])
    except Exception as error:
        if len(prompts) == 1:
            return [error]
        return [read_together(model, [one])[0] for one in prompts]
    rows = zip(prompts, parts, hidden, states, strict=True)
    return [_taken(prompt, part, inputs, state) for (prompt, _), part, inputs, state in rows]


def _read_rows(
    model: Gecko, parts: Sequence[Tensor], states: Sequence[GeckoState | None]
) -> tuple[list[Tensor], list[GeckoState]]:
    """Return for each part (n,) the inputs of the head (n, D) and the state of one row after it."""
    if len(parts) == 1:
        hidden, state = read_piece(model, parts[0].unsqueeze(0), states[0])
        return [hidden[0]], [state]
    fresh = all(state is None for state in states)
    before = None if fresh else GeckoState.stack([model.empty_state() if x is None else x for x in states])
    lengths = torch.tensor([len(part) for part in parts], device="cpu")
    tokens = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    hidden, after = model.hidden(tokens, state=before, lengths=lengths)
    rows = range(len(parts))
    return [hidden[row, : lengths[row]] for row in rows], [_row(after, row) for row in rows]


def _row(state: GeckoState, row: int) -> GeckoState:
    return state.map(lambda x: x[row : row + 1])


def _taken(prompt: PromptPrefill, tokens: Tensor, hidden: Tensor, state: GeckoState) -> Prefill | Exception | None:
    try:
        return prompt.take(tokens, hidden, state)
    except Exception as error:
        return error
