"""Continuous batching: sequences join and leave the batch at any step, each at its own position."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from gecko.inference.decoder import Decoder
from gecko.inference.prefill import Prefill, inference, piece_length
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Event, Finished, QueueFullError, Request, Token
from gecko.inference.sampling import Sampler, finite_rows, not_finite
from gecko.models.gecko import Gecko
from gecko.state import GeckoState


class PromptPrefill:
    """Chunked prefill of one prompt, shared by all requests with that prompt.

    Args:
        request: one of the requests; gives the prompt and the initial state.
        cache: cached states of prefixes; not used if the request has an initial state.
        piece: tokens read at once when no sequence is decoding; the cache keeps a state at a multiple of it.
    """

    def __init__(self, request: Request, model: Gecko, cache: PrefixCache | None, piece: int) -> None:
        self.requests: dict[int, Request] = {}
        """The requests that share the prefill, by id."""
        self._model, self._piece, self._initial_state = model, piece, request.state
        self._device = model.embedding.weight.device
        self._cache = cache if request.state is None else None
        self._prompt = request.prompt.to("cpu", torch.int64)
        self._state: GeckoState | None = None
        self.position = request.start_position
        """Tokens of the sequence that the state has read."""
        self.piece = 0
        """Tokens that the last ``read`` has read."""
        self._read = self._known = 0
        self._started = False
        self._borders: Mapping[int, bytes] = {}

    @property
    def reused(self) -> int:
        """Prompt tokens that were not read: from the cache, or shared with another request."""
        return self._known + (len(self.requests) - 1) * len(self._prompt)

    def serves(self, request: Request) -> bool:
        """Return whether ``request`` has the same prompt and initial state."""
        if request.state is not self._initial_state or len(request.prompt) != len(self._prompt):
            return False
        return torch.equal(request.prompt.to("cpu", torch.int64), self._prompt)

    def read(self, piece: int) -> Prefill | None:
        """Read up to the next multiple of ``piece``; return the result at the end of the prompt, else None."""
        if not self._started:
            self._start()
        begin, end = self._read, self._next_border(piece)
        tokens = self._prompt[begin:end].unsqueeze(0).to(self._device)
        hidden, self._state = self._model.hidden(tokens, state=self._state)
        self._read, self.piece, self.position = end, end - begin, self.position + end - begin
        if self._cache is not None and end in self._borders:
            self._cache.keep(self._borders[end], self._state)
        if end < len(self._prompt):
            return None
        return Prefill(self._state, self._model.head(hidden[:, -1:])[0, 0], self._seen())

    def _start(self) -> None:
        """Look the prompt up in the cache, to which earlier requests may have added since this one was submitted."""
        self._started = True
        if self._initial_state is not None:
            self._state = self._initial_state.to(self._device)
        if self._cache is None:
            return
        prefix = self._cache.find(self._model.fingerprint(), self._prompt, self._model.config.chunk_size, self._piece)
        self._borders = prefix.borders
        if prefix.state is not None:
            self._state = prefix.state
            self.position = self._read = self._known = prefix.length

    def _next_border(self, piece: int) -> int:
        kept = (border for border in self._borders if border > self._read)
        return min(len(self._prompt), self._read + piece - self.position % piece, *kept)

    def _seen(self) -> Tensor:
        seen = torch.zeros(self._model.config.vocab_size, dtype=torch.bool)
        return seen.index_fill_(0, self._prompt, True).to(self._device)


SHORT_PIECE = 512
"""Approximate number of prompt tokens read at once while other sequences are decoding."""


@dataclass
class _Sequence:
    """A sequence in the decoding batch."""

    request_id: int
    request: Request
    position: int
    """Tokens of the sequence, including the generated ones."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    generated: int = 0
    pending_token: int = -1
    """Token generated last, which the state has not read yet."""


class Engine:
    """Scheduler and model runner for many requests; the tokens of a request do not depend on the others.

    Requests wait in a queue for one of ``rows`` places. Admitted prompts take turns at prefilling one piece per step; a
    prompt that several admitted requests share is prefilled once. An engine is not thread-safe.

    Args:
        rows: maximum number of requests in prefill or decoding.
        max_queued: maximum number of waiting requests.
        piece: prompt tokens per step; None: ``SHORT_PIECE`` while other sequences are decoding, else ``piece_length``.
        prefix_cache: cache of states after prompt prefixes; None: no cache.
    """

    def __init__(
        self, model: Gecko, *, rows: int = 16, max_queued: int = 256, piece: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        for name, value, least in (("rows", rows, 1), ("max_queued", max_queued, 1), ("piece", piece, 1)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}.")
        self._model, self._cache, self._max_queued = model, prefix_cache, max_queued
        window = 2 * model.config.chunk_size
        self._long_piece = piece or piece_length(model.config)
        self._short_piece = piece or window * max(1, SHORT_PIECE // window)
        self._ids = count()
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._prefills: deque[PromptPrefill] = deque()
        with inference(model):
            self._decoder = Decoder(model, rows)
        self._rows: list[_Sequence] = []
        """The decoding sequences, by slot of the decoder."""
        self._sampler = Sampler([])
        self._pending: list[Event] = []
        self.prompt_tokens_read = 0
        self.prefix_tokens_reused = 0
        """Prompt tokens that were not read, thanks to the cache or a shared prompt."""
        self.tokens_made = 0

    @property
    def active(self) -> int:
        """Number of requests in prefill or decoding."""
        # Metrics call this from another thread: copy() is atomic, while a step changes the deque.
        return sum(len(prefill.requests) for prefill in self._prefills.copy()) + len(self._rows)

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._queue or self._prefills or self._rows or self._pending)

    def submit(self, request: Request) -> int:
        """Add a request to the queue and return its id.

        Raises:
            TypeError, ValueError: the request does not fit the model.
            QueueFullError: ``max_queued`` requests are waiting.
        """
        request.check(self._model.config)
        if request.state is not None:
            with inference(self._model):
                self._model.check_state(request.state, 1)
        if len(self._queue) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} requests wait already; try again later.")
        request_id = next(self._ids)
        self._queue[request_id] = request
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request and free its place; the next step returns its last event. No effect on finished requests."""
        place = next((place for place, row in enumerate(self._rows) if row.request_id == request_id), None)
        prefill = next((prefill for prefill in self._prefills if request_id in prefill.requests), None)
        if request_id in self._queue:
            position = self._queue.pop(request_id).start_position
        elif prefill is not None:
            position = prefill.position
            del prefill.requests[request_id]
            if not prefill.requests:
                self._prefills.remove(prefill)
        elif place is not None:
            position = self._rows[place].position
            with inference(self._model):
                self._remove([place])
        else:
            return
        self._pending.append(Finished(request_id, "cancelled", None, position))

    def abandon(self) -> None:
        """Drop all requests, also after a step that failed midway; no events of them follow."""
        for place in reversed(range(self._decoder.count)):
            self._decoder.remove(place)
        self._rows, self._pending, self._sampler = [], [], Sampler([])
        self._queue.clear()
        self._prefills.clear()

    def step(self) -> list[Event]:
        """Prefill at most one piece of one prompt, then generate one token for every decoding sequence."""
        events, self._pending = self._pending, []
        with inference(self._model):
            logits = self._decode()
            added = self._read_piece(events)
            if added is not None:
                logits = added if logits is None else torch.cat([logits, added])
            if logits is not None:
                self._draw_tokens(logits, events)
        return events

    def _decode(self) -> Tensor | None:
        """Return the logits (n, V) after the pending tokens of all sequences; None if there are none."""
        if not self._rows:
            return None
        return self._decoder.step([row.pending_token for row in self._rows])

    def _read_piece(self, events: list[Event]) -> Tensor | None:
        """Prefill a piece of the next prompt; at its end, return the logits (n, V) of the sequences that it starts."""
        self._admit()
        if not self._prefills:
            return None
        prefill = self._prefills.popleft()
        try:
            result = prefill.read(self._short_piece if self._rows else self._long_piece)
        except Exception as error:
            # Only the requests of this prompt fail: the states of the others are in the slots.
            events += [_failed(request_id, error, prefill.position) for request_id in prefill.requests]
            return None
        self.prompt_tokens_read += prefill.piece
        if result is None:
            self._prefills.append(prefill)
            return None
        self.prefix_tokens_reused += prefill.reused
        return self._add_sequences(prefill, result, events)

    def _admit(self) -> None:
        """Admit waiting requests while places are free."""
        while self._queue and self.active < self._decoder.capacity:
            request_id, request = self._queue.popitem(last=False)
            prefill = next((prefill for prefill in self._prefills if prefill.serves(request)), None)
            if prefill is None:
                prefill = PromptPrefill(request, self._model, self._cache, self._long_piece)
                self._prefills.append(prefill)
            prefill.requests[request_id] = request

    def _add_sequences(self, prefill: PromptPrefill, result: Prefill, events: list[Event]) -> Tensor | None:
        """Append a sequence for each request of a finished prefill; return their logits (n, V), or None."""
        before = len(self._rows)
        for request_id, request in prefill.requests.items():
            if request.max_new_tokens == 0:
                events.append(Finished(request_id, "length", None, prefill.position))
                continue
            try:
                self._add(_Sequence(request_id, request, prefill.position), result)
            except Exception as error:  # its sampling options are wrong; the slots are unchanged
                events.append(_failed(request_id, error, prefill.position))
        added = len(self._rows) - before
        return result.logits.expand(added, -1) if added else None

    def _draw_tokens(self, logits: Tensor, events: list[Event]) -> None:
        """Draw a token for every sequence and remove the finished ones."""
        finite = finite_rows(logits)
        broken: dict[int, str] = {}
        if not bool(finite.all()):
            broken = {place: not_finite(logits[place]) for place in (~finite).nonzero().flatten().tolist()}
            logits = logits.masked_fill(~finite.unsqueeze(1), 0)
        tokens = self._sampler.draw(logits, [row.generator for row in self._rows], self._decoder.seen)
        logprobs = self._logprobs(logits, tokens)
        finished = []
        for place, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if place in broken:
                end = Finished(row.request_id, "error", broken[place], row.position)
            elif token in row.request.stop_tokens:
                end = Finished(row.request_id, "stop", None, row.position)
            else:
                events.append(Token(row.request_id, token, *logprobs.get(place, ())))
                row.pending_token, row.generated, row.position = token, row.generated + 1, row.position + 1
                if row.generated < row.request.max_new_tokens:
                    continue
                end = Finished(row.request_id, "length", None, row.position)
            finished.append(place)
            events.append(end)
        self.tokens_made += sum(isinstance(event, Token) for event in events)
        if self._sampler.uses_history:
            self._decoder.seen[range(len(tokens)), tokens] = True
        self._remove(finished)

    def _logprobs(self, logits: Tensor, tokens: list[int]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """Return by slot, for requests with ``logprobs``: that of the token, and the most likely ids with theirs."""
        wanted = {place: number for place, row in enumerate(self._rows) if (number := row.request.logprobs) is not None}
        if not wanted:
            return {}
        places = list(wanted)
        distributions = logits[places].double().log_softmax(-1)
        own = distributions[range(len(places)), [tokens[place] for place in places]].tolist()
        top = distributions.topk(max(wanted.values()), dim=-1)
        found = zip(places, own, top.indices.tolist(), top.values.tolist(), strict=True)
        return {
            place: (logprob, tuple(zip(ids[: wanted[place]], values[: wanted[place]], strict=True)))
            for place, logprob, ids, values in found
        }

    def _add(self, row: _Sequence, result: Prefill) -> None:
        sampler = self._new_sampler([*self._rows, row])
        row.generator.manual_seed(row.request.seed)
        self._decoder.add(result.state, result.seen)
        self._rows.append(row)
        self._sampler = sampler

    def _remove(self, places: list[int]) -> None:
        # In descending order, so that the sequence that moves into a freed slot is one that stays.
        for place in sorted(places, reverse=True):
            self._decoder.remove(place)
            self._rows[place] = self._rows[-1]
            self._rows.pop()
        if places:
            self._sampler = self._new_sampler(self._rows)

    def _new_sampler(self, rows: Sequence[_Sequence]) -> Sampler:
        return Sampler([row.request.sampling for row in rows], self._decoder.seen.device)


def _failed(request_id: int, error: Exception, position: int) -> Finished:
    return Finished(request_id, "error", f"{type(error).__name__}: {error}", position)
