"""Continuous batching: sequences join and leave the batch at any step, each at its own position."""

from __future__ import annotations

import time
from collections import deque
from itertools import count

import torch

from gecko.inference.batch import DecodingBatch
from gecko.inference.grammar import ConstraintError
from gecko.inference.pieces import PiecePace, piece_length
from gecko.inference.prefill import Prefill, PromptPrefill, inference, read_together, together
from gecko.inference.prefix_cache import PrefixCache
from gecko.inference.request import Event, Finished, PromptRead, QueueFullError, Request, Token
from gecko.models.gecko import Gecko

STEP_SECONDS = 0.08
"""Time, while sequences are decoding, to which the pieces of prompts are fitted on a CPU."""
KEPT_RESULTS = 4
"""Maximum number of read prompts whose result is kept for waiting requests of the same call."""
AGEING = 16
"""Tokens by which a waiting prompt counts as shorter with every step, so that no prompt waits for ever."""


class Engine:
    """Scheduler and model runner for many requests; the tokens of a request do not depend on the others.

    Requests wait in a queue for one of ``rows`` places. A step prefills one piece of one prompt, or several short
    prompts in one call of the model, whose last bits may differ from those of one prompt alone. Of the prompts that
    wait for a place or for their next piece, the one with the fewest tokens left is taken first. Every step that a
    prompt has waited counts like ``AGEING`` tokens less. A prompt that several admitted requests share is prefilled
    once. Requests with the same prompt tensor, such as the choices of one call, also share it if some are admitted
    later. An engine is not thread-safe.

    Args:
        rows: maximum number of requests in prefill or decoding.
        max_queued: maximum number of waiting requests.
        piece: prompt tokens per step; None: as many as take ``STEP_SECONDS`` by the speed of the last pieces while
            other sequences are decoding, else ``piece_length``.
        prefix_cache: cache of states after prompt prefixes; None: no cache.
        window_dtype: as for ``Decoder``.
    """

    def __init__(
        self, model: Gecko, *, rows: int = 16, max_queued: int = 256, piece: int | None = None,
        prefix_cache: PrefixCache | None = None, window_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("rows", rows), ("max_queued", max_queued), ("piece", piece)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}.")
        self._model, self._cache, self._rows, self._max_queued = model, prefix_cache, rows, max_queued
        self._piece, self._long_piece = piece, piece or piece_length(model.config)
        self._pace = PiecePace(model.config, STEP_SECONDS)
        self._ids, self._steps = count(), 0
        self._queue: dict[int, tuple[Request, int]] = {}
        """Waiting requests, each with the step at which it was submitted."""
        self._prefills: deque[PromptPrefill] = deque()
        self._results: deque[tuple[PromptPrefill, Prefill]] = deque(maxlen=KEPT_RESULTS)
        self._batch = DecodingBatch(model, rows, window_dtype)
        """The decoding sequences; their keys are ids of requests."""
        self._pending: list[Event] = []
        self.prompt_tokens_read = 0
        self.prefix_tokens_reused = 0
        """Prompt tokens that were not read, thanks to the cache or a shared prompt."""
        self.tokens_made = 0

    @property
    def active(self) -> int:
        """Number of requests in prefill or decoding."""
        # Metrics call this from another thread: copy() is atomic, while a step changes the deque.
        return sum(len(prefill.requests) for prefill in self._prefills.copy()) + len(self._batch.sequences)

    @property
    def queued(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._queue or self._prefills or self._batch.sequences or self._pending)

    def submit(self, request: Request) -> int:
        """Add a request to the queue and return its id. Raise TypeError or ValueError if the request does not fit the
        model, QueueFullError if ``max_queued`` requests are waiting."""
        request.check(self._model.config)
        if request.state is not None:
            with inference(self._model):
                self._model.check_state(request.state, 1)
        if len(self._queue) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} requests wait already; try again later.")
        request_id = next(self._ids)
        self._queue[request_id] = request, self._steps
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request and free its place; the next step returns its last event. No effect on finished requests."""
        slot = next((slot for slot, one in enumerate(self._batch.sequences) if one.key == request_id), None)
        prefill = next((prefill for prefill in self._prefills if request_id in prefill.requests), None)
        if request_id in self._queue:
            position = self._queue.pop(request_id)[0].start_position
        elif prefill is not None:
            position = prefill.position
            del prefill.requests[request_id]
            if not prefill.requests:
                self._prefills.remove(prefill)
        elif slot is not None:
            position = self._batch.sequences[slot].position
            with inference(self._model):
                self._batch.remove(slot)
        else:
            return
        self._pending.append(Finished(request_id, "cancelled", None, position))

    def abandon(self) -> None:
        """Drop all requests, also after a step that failed midway; no events of them follow."""
        for held in (self._pending, self._batch, self._queue, self._prefills, self._results):
            held.clear()

    def step(self) -> list[Event]:
        """Prefill a piece of a prompt or several short prompts, then generate a token for every decoding sequence."""
        events, self._pending = self._pending, []
        self._steps += 1
        with inference(self._model):
            self._batch.decode()
            self._admit(events)
            if self._prefills:
                self._read_piece(events)
            if self._batch.sequences:
                drawn = self._batch.draw()
                self.tokens_made += sum(isinstance(event, Token) for event in drawn)
                events += drawn
        return events

    def _admit(self, events: list[Event]) -> None:
        while self._queue and self.active < self._rows:
            request_id = min(self._queue, key=self._turn)
            request, arrival = self._queue.pop(request_id)
            result = self._kept_result(request)
            if result is not None:
                self.prefix_tokens_reused += len(request.prompt)
                self._add_sequence(request_id, request, result, events)
                continue
            prefill = next((prefill for prefill in self._prefills if prefill.serves(request)), None)
            if prefill is None:
                prefill = PromptPrefill(request, self._model, self._cache, self._long_piece, arrival)
                self._prefills.append(prefill)
            prefill.requests[request_id] = request
        if self._results:
            self._results = deque((one for one in self._results if self._is_awaited(one[0])), KEPT_RESULTS)

    def _turn(self, request_id: int) -> int:
        """Return the place of a waiting request in the order of admission; the lowest is first."""
        request, arrival = self._queue[request_id]
        return AGEING * arrival + (len(request.prompt) if self._kept_result(request) is None else 0)

    def _kept_result(self, request: Request) -> Prefill | None:
        return next((result for prefill, result in self._results if prefill.is_of_call(request)), None)

    def _is_awaited(self, prefill: PromptPrefill) -> bool:
        """Return whether requests of the same call wait for a place."""
        return any(prefill.is_of_call(request) for request, _ in self._queue.values())

    def _read_piece(self, events: list[Event]) -> None:
        """Prefill a piece of the next prompt, and short prompts beside it. At its end, its sequences join the batch."""
        first, *others = sorted(self._prefills, key=lambda one: one.remaining + AGEING * one.arrival)
        first.start()
        budget = piece = self._piece or (self._pace.piece if self._batch.sequences else self._long_piece)
        # A call for a short rest takes almost as long as one for a piece, so the last piece may be longer.
        if self._piece is None and first.remaining <= min(3 * piece // 2, self._long_piece):
            piece = first.position + first.remaining
        known = first.known
        group = together([first, *others], piece, budget) if known is None else [(first, piece)]
        for prefill, _ in group:
            self._prefills.remove(prefill)
        begin = time.perf_counter()
        results = read_together(self._model, group) if known is None else [known]
        if self._model.embedding.weight.device.type == "cpu":  # elsewhere the call returns before the work is done
            tokens = len(group) * max(prefill.piece for prefill, _ in group)
            self._pace.record(tokens, time.perf_counter() - begin)
        for (prefill, _), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                # Only the requests of this prompt fail: the states of the others are in the batch.
                events += [_failed(request_id, result, prefill.position) for request_id in prefill.requests]
                continue
            self.prompt_tokens_read += prefill.piece
            if result is None:
                self._prefills.append(prefill)
                continue
            self.prefix_tokens_reused += prefill.reused
            if self._is_awaited(prefill):
                self._results.append((prefill, result))
            for request_id, request in prefill.requests.items():
                self._add_sequence(request_id, request, result, events)

    def _add_sequence(self, request_id: int, request: Request, result: Prefill, events: list[Event]) -> None:
        position = result.state.position[0]
        if result.scores is not None:
            events.append(PromptRead(request_id, result.scores))
        if request.keep is not None:
            # The tensors of the state may be views of much larger ones.
            request.keep.prompt = result.state.map(
                lambda x: x.to("cpu", copy=True, memory_format=torch.contiguous_format)
            )
        if request.max_new_tokens == 0:
            events.append(Finished(request_id, "length", None, position))
            return
        try:
            self._batch.add(request_id, request, result)
        except ConstraintError as error:
            events.append(Finished(request_id, "constraint", str(error), position))
        except Exception as error:  # its sampling options are wrong; the batch is unchanged
            events.append(_failed(request_id, error, position))


def _failed(request_id: int, error: Exception, position: int) -> Finished:
    return Finished(request_id, "error", f"{type(error).__name__}: {error}", position)
