"""Continuous batching: texts join and leave at any step, each at its own position, and none waits for another's end."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from gecko.generation import Reading, piece_length
from gecko.generation.reading import inference
from gecko.generation.sampling import Sampler, finite_rows, not_finite
from gecko.model import Gecko
from gecko.serving.prefix_cache import PrefixCache
from gecko.serving.prompt import PromptReader
from gecko.serving.request import Event, Finished, QueueFullError, Request, Token
from gecko.serving.slots import Slots

SHORT_PIECE = 512
"""About how many prompt tokens are read at once while others wait for their next token."""


@dataclass
class _Row:
    """A text that is being continued."""

    request_id: int
    request: Request
    position: int
    """Tokens of the text, those made included."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    made: int = 0
    unread: int = -1
    """The token made last, which the state has not read yet."""


class Engine:
    """Continues many texts at once; every one gets the tokens it would get alone.

    A request waits in the queue for one of ``rows`` places. Those that have a place and whose prompts are not read
    take turns at reading a piece; a prompt that several of them have in common is read once. Nothing here is for
    several threads.

    Args:
        rows: texts that are read or continued at once.
        max_queued: requests that may wait for a place.
        piece: prompt tokens read at once; None: ``SHORT_PIECE`` where others wait for their next token, else as many
            as read fastest.
        prefix_cache: where to find and keep states of beginnings of prompts.
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
        self._readers: deque[PromptReader] = deque()
        with inference(model):
            self._slots = Slots(model, rows)
        self._rows: list[_Row] = []
        """By their place in the slots."""
        self._sampler = Sampler([])
        self._pending: list[Event] = []
        self.prompt_tokens_read = 0
        self.prefix_tokens_reused = 0
        """Prompt tokens that did not have to be read."""
        self.tokens_made = 0

    @property
    def active(self) -> int:
        """Requests that have a place."""
        # Metrics ask from another thread: a copy is made in one call, while a step would change what is counted.
        return sum(len(reader.requests) for reader in self._readers.copy()) + len(self._rows)

    @property
    def queued(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._queue or self._readers or self._rows or self._pending)

    def submit(self, request: Request) -> int:
        """Take a request in, and name it.

        Raises:
            TypeError, ValueError: what cannot be asked of this model.
            QueueFullError: too many wait already.
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
        """Give up a request and free its place; its last event comes with the next step. No effect on finished ones."""
        place = next((place for place, row in enumerate(self._rows) if row.request_id == request_id), None)
        reader = next((reader for reader in self._readers if request_id in reader.requests), None)
        if request_id in self._queue:
            position = self._queue.pop(request_id).begins_at
        elif reader is not None:
            position = reader.position
            del reader.requests[request_id]
            if not reader.requests:
                self._readers.remove(reader)
        elif place is not None:
            position = self._rows[place].position
            with inference(self._model):
                self._remove([place])
        else:
            return
        self._pending.append(Finished(request_id, "cancelled", None, position))

    def abandon(self) -> None:
        """Give up everything, whatever state a failed step left it in; no more events of it come."""
        for place in reversed(range(self._slots.count)):
            self._slots.remove(place)
        self._rows, self._pending, self._sampler = [], [], Sampler([])
        self._queue.clear()
        self._readers.clear()

    def step(self) -> list[Event]:
        """Read one piece of one prompt at most, then make one token of every text whose prompt is read."""
        events, self._pending = self._pending, []
        with inference(self._model):
            logits = self._decode()
            added = self._read_piece(events)
            if added is not None:
                logits = added if logits is None else torch.cat([logits, added])
            if logits is not None:
                self._make_tokens(logits, events)
        return events

    def _decode(self) -> Tensor | None:
        """Logits (n, V) of all rows after their last token."""
        if not self._rows:
            return None
        tokens = torch.tensor([row.unread for row in self._rows], device=self._slots.seen.device)
        logits, state = self._model.step(tokens, self._slots.state)
        self._slots.update(state)
        return logits

    def _read_piece(self, events: list[Event]) -> Tensor | None:
        """Of the prompt whose turn it is; where that ends it, the logits (n, V) of the rows that it became."""
        self._admit()
        if not self._readers:
            return None
        reader = self._readers.popleft()
        try:
            reading = reader.read(self._short_piece if self._rows else self._long_piece)
        except Exception as error:
            # It is these texts' alone, whatever it is: the states of the others are elsewhere.
            events += [_failed(request_id, error, reader.position) for request_id in reader.requests]
            return None
        self.prompt_tokens_read += reader.piece
        if reading is None:
            self._readers.append(reader)
            return None
        self.prefix_tokens_reused += reader.reused
        return self._begin(reader, reading, events)

    def _admit(self) -> None:
        """Give free places to those that wait."""
        while self._queue and self.active < self._slots.capacity:
            request_id, request = self._queue.popitem(last=False)
            reader = next((reader for reader in self._readers if reader.serves(request)), None)
            if reader is None:
                reader = PromptReader(request, self._model, self._cache, self._long_piece)
                self._readers.append(reader)
            reader.requests[request_id] = request

    def _begin(self, reader: PromptReader, reading: Reading, events: list[Event]) -> Tensor | None:
        """Make a row of every request whose prompt this was, behind the others; their logits (n, V)."""
        before = len(self._rows)
        for request_id, request in reader.requests.items():
            if request.max_new_tokens == 0:
                events.append(Finished(request_id, "length", None, reader.position))
                continue
            try:
                self._add(_Row(request_id, request, reader.position), reading)
            except Exception as error:  # its own numbers are wrong: nothing of it has joined the others yet
                events.append(_failed(request_id, error, reader.position))
        added = len(self._rows) - before
        return reading.logits.expand(added, -1) if added else None

    def _make_tokens(self, logits: Tensor, events: list[Event]) -> None:
        """Draw a token for every row, and end those that are finished."""
        finite = finite_rows(logits)
        broken: dict[int, str] = {}
        if not bool(finite.all()):
            broken = {place: not_finite(logits[place]) for place in (~finite).nonzero().flatten().tolist()}
            logits = logits.masked_fill(~finite.unsqueeze(1), 0)
        tokens = self._sampler.draw(logits, [row.generator for row in self._rows], self._slots.seen)
        details = self._details(logits, tokens)
        finished = []
        for place, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if place in broken:
                end = Finished(row.request_id, "error", broken[place], row.position)
            elif token in row.request.stop_tokens:
                end = Finished(row.request_id, "stop", None, row.position)
            else:
                events.append(Token(row.request_id, token, *details.get(place, ())))
                row.unread, row.made, row.position = token, row.made + 1, row.position + 1
                if row.made < row.request.max_new_tokens:
                    continue
                end = Finished(row.request_id, "length", None, row.position)
            finished.append(place)
            events.append(end)
        self.tokens_made += sum(isinstance(event, Token) for event in events)
        if self._sampler.looks_back:
            self._slots.seen[range(len(tokens)), tokens] = True
        self._remove(finished)

    def _details(self, logits: Tensor, tokens: list[int]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """By place, for those who asked: the token's log-probability, and the likeliest ids with theirs."""
        wanted = {
            place: number
            for place, row in enumerate(self._rows)
            if (number := row.request.log_probabilities) is not None
        }
        if not wanted:
            return {}
        places = list(wanted)
        chances = logits[places].double().log_softmax(-1)
        own = chances[range(len(places)), [tokens[place] for place in places]].tolist()
        top = chances.topk(max(wanted.values()), dim=-1)
        found = zip(places, own, top.indices.tolist(), top.values.tolist(), strict=True)
        return {
            place: (chance, tuple(zip(ids[: wanted[place]], values[: wanted[place]], strict=True)))
            for place, chance, ids, values in found
        }

    def _add(self, row: _Row, reading: Reading) -> None:
        sampler = self._new_sampler([*self._rows, row])
        row.generator.manual_seed(row.request.seed)
        self._slots.add(reading.state, reading.seen)
        self._rows.append(row)
        self._sampler = sampler

    def _remove(self, places: list[int]) -> None:
        # From the last on, so that the row which moves to a freed place is one that stays.
        for place in sorted(places, reverse=True):
            self._slots.remove(place)
            self._rows[place] = self._rows[-1]
            self._rows.pop()
        if places:
            self._sampler = self._new_sampler(self._rows)

    def _new_sampler(self, rows: Sequence[_Row]) -> Sampler:
        return Sampler([row.request.sampling for row in rows], self._slots.seen.device)


def _failed(request_id: int, error: Exception, position: int) -> Finished:
    return Finished(request_id, "error", f"{type(error).__name__}: {error}", position)
