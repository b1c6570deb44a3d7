"""Sequences that decode side by side: one step reads the last token of each and samples the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.inference.decoder import Decoder
from gecko.inference.grammar import ConstraintError, Matcher
from gecko.inference.prefill import Prefill
from gecko.inference.request import EndReason, EndState, Event, Finished, Request, Token
from gecko.inference.sampling import NO_TOKEN, Sampler, broken_rows, not_finite, random_numbers
from gecko.models.gecko import Gecko

Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token, and the most likely ids with theirs."""


@dataclass
class DecodingSequence:
    """A sequence in the batch. Raise ConstraintError if the constraint of the request allows no token."""

    key: int
    """``request_id`` of its events."""
    request: Request
    position: int
    """Tokens of the sequence, including the generated ones."""
    generated: int = 0
    pending_token: int | None = None
    """Token generated last, which the state has not read yet."""
    counts: Tensor | None = None
    """(V,) int32, how often each token was generated; None if no penalty depends on it."""

    def __post_init__(self) -> None:
        request = self.request
        self.random = random_numbers(request.seed)
        self.matcher: Matcher | None = None
        if request.constraint is not None:
            self.matcher = Matcher(request.constraint, request.stop_tokens, request.sampling.excluded)

    @property
    def is_early(self) -> bool:
        """Whether no stop token may come next."""
        return self.generated < self.request.min_new_tokens

    def take(self, token: int, broken: str | None, logprobs: Logprobs | None) -> tuple[Token | None, Finished | None]:
        """Add the token, unless the sequence ends with it; return its event, if it was added, and the end."""
        made = Token(self.key, token, *(logprobs or ()))

        def end(reason: EndReason, error: str | None = None, stop: Token | None = None) -> Finished:
            return Finished(self.key, reason, error, self.position, stop)

        if token < 0 and self.matcher is not None and self.matcher.finished:
            return None, end("stop")  # before the first token
        if broken is not None:
            return None, end("error", broken)
        if token in self.request.stop_tokens:
            return None, end("stop", stop=None if logprobs is None else made)
        self.pending_token = token
        self.generated += 1
        self.position += 1
        if self.matcher is not None:
            try:
                self.matcher.advance(token)
            except ConstraintError as error:
                return None, end("constraint", str(error))
            except Exception as error:  # of the constraint: the other sequences go on
                return None, end("error", f"{type(error).__name__}: {error}")
            if self.matcher.finished:
                return made, end("stop")
        return made, end("length") if self.generated == self.request.max_new_tokens else None


class DecodingBatch:
    """Up to ``capacity`` sequences, each at its own position; they join and leave between two steps.

    A step is ``decode`` and then ``draw``. Sequences that were added in between take part in the draw with the logits
    of their prefill. The tokens of a sequence depend on its own prefill and seed only. Call the methods within
    ``inference(model)``. ``window_dtype`` as for ``Decoder``.
    """

    def __init__(self, model: Gecko, capacity: int, window_dtype: torch.dtype | None = None) -> None:
        self.sequences: list[DecodingSequence] = []
        self.decoder = Decoder(model, capacity, window_dtype)
        self._sampler = Sampler([])
        self._logits: Tensor | None = None

    def add(self, key: int, request: Request, prefill: Prefill) -> None:
        """Add the sequence of a request, whose prompt ``prefill`` has read; its events have ``key``. Raise ValueError
        if its sampling options are wrong, or its constraint allows no token; the batch is unchanged."""
        sequence = DecodingSequence(key, request, prefill.state.position[0])
        sampler = self._new_sampler([*self.sequences, sequence])
        if request.sampling.counts_tokens:
            sequence.counts = torch.zeros_like(prefill.seen, dtype=torch.int32)
        self.decoder.add(prefill.state, prefill.seen)
        logits = prefill.logits.unsqueeze(0)
        self._logits = logits if self._logits is None else torch.cat([self._logits, logits])
        self.sequences.append(sequence)
        self._sampler = sampler

    def decode(self) -> None:
        """Read the pending token of every sequence; no effect if there is none to read."""
        pending = [one.pending_token for one in self.sequences if one.pending_token is not None]
        if not pending:
            return
        assert len(pending) == len(self.sequences), "all sequences have drawn since the last step"
        self._logits = self.decoder.step(pending)
        # The states have read them now, even if drawing the next tokens fails.
        for sequence in self.sequences:
            sequence.pending_token = None

    def draw(self, *, strict: bool = False) -> list[Event]:
        """Draw the next token of every sequence and return the events; sequences that end leave the batch. Logits that
        are not finite end their sequence; if ``strict``, they raise ValueError before any token is drawn. So do scores
        from which no token can be drawn, but after the random numbers."""
        logits, requests = self._logits, [one.request for one in self.sequences]
        assert logits is not None, "there must be a sequence"
        on_gpu: list[int] = []
        if self.decoder.backend == "triton":  # which draws tokens of plain sampling, with its own random numbers
            temperatures = [request.sampling.temperature for request in requests]
            on_gpu = self.decoder.draw(logits, temperatures, [request.seed for request in requests])
        rows = [slot for slot, token in enumerate(on_gpu) if token < 0] if on_gpu else broken_rows(logits)
        broken = {slot: not_finite(logits[slot]) for slot in rows}
        self._refuse(broken if strict else {})
        if broken:
            logits = logits.index_fill(0, torch.tensor(rows, device=logits.device), 0)
        tokens = self._tokens(self._constrained(self._without_early_stops(logits)), on_gpu)
        broken = {slot: NO_TOKEN for slot, token in enumerate(tokens) if token < 0} | broken
        self._refuse(broken if strict else {})
        if self._sampler.uses_history:
            self.decoder.seen[range(len(tokens)), tokens] = True
        logprobs = self._logprobs(logits, tokens)
        events: list[Event] = []
        ends: dict[int, Finished] = {}
        for slot, (sequence, token) in enumerate(zip(self.sequences, tokens, strict=True)):
            if sequence.counts is not None:
                sequence.counts[token] += 1
            made, end = sequence.take(token, broken.get(slot), logprobs.get(slot))
            events += filter(None, (made, end))
            if end is not None:
                ends[slot] = end
        # In descending order, so that the sequence that moves into a freed slot is one that stays.
        for slot, end in reversed(ends.items()):
            self.finish(slot) if end.error is None else self.remove(slot)
        return events

    def finish(self, slot: int) -> None:
        """Remove a sequence, and leave its state on the CPU if its request keeps it."""
        if (keep := self.sequences[slot].request.keep) is not None:
            end = self.end(slot)
            keep.end = end._replace(state=end.state.to("cpu"))
        self.remove(slot)

    def remove(self, slot: int) -> None:
        """Remove a sequence; the one in the last slot moves to its place."""
        self.decoder.remove(slot)
        self.sequences[slot] = self.sequences[-1]
        self.sequences.pop()
        self._sampler = self._new_sampler(self.sequences)
        if self._logits is not None:
            kept = list(range(len(self._logits)))
            kept[slot] = kept[-1]
            self._logits = self._logits[kept[:-1]] if self.sequences else None

    def clear(self) -> None:
        """Remove all sequences, also after a step that failed midway."""
        self.sequences, self._sampler, self._logits = [], Sampler([]), None
        self.decoder.resize(0)

    def end(self, slot: int) -> EndState:
        """Return where a sequence ends if it is removed now, with a copy of its state."""
        sequence = self.sequences[slot]
        return EndState(self.decoder.state(slot), sequence.pending_token, sequence.position)

    def _refuse(self, broken: dict[int, str]) -> None:
        """Raise ValueError for the first slot that is broken."""
        if broken:
            slot = min(broken)
            raise ValueError(f"row {self.sequences[slot].key}: {broken[slot]}")

    def _without_early_stops(self, logits: Tensor) -> Tensor:
        """Exclude the stop tokens of sequences that have fewer tokens than their ``min_new_tokens``."""
        early = [
            (slot, token) for slot, one in enumerate(self.sequences) if one.is_early
            for token in one.request.stop_tokens if 0 <= token < logits.shape[1]
        ]  # fmt: skip
        if not early:
            return logits
        slots, tokens = torch.tensor(early, device=logits.device).unbind(1)
        return logits.index_put((slots, tokens), logits.new_tensor(-torch.inf))

    def _constrained(self, logits: Tensor) -> Tensor:
        found = {slot: one.matcher.allowed for slot, one in enumerate(self.sequences) if one.matcher is not None}
        if not found:
            return logits
        slots = torch.tensor(list(found), device=logits.device)
        allowed = torch.stack(list(found.values())).to(logits.device)
        return logits.index_copy(0, slots, logits[slots].masked_fill(~allowed, -torch.inf))

    def _tokens(self, logits: Tensor, on_gpu: list[int]) -> list[int]:
        """Return the next tokens: those drawn ``on_gpu``, if any, where the logits alone decide."""
        plain = [
            bool(on_gpu) and one.request.sampling.is_plain and one.matcher is None and not one.is_early
            for one in self.sequences
        ]
        if all(plain):
            return on_gpu
        counts = [one.counts for one in self.sequences if one.counts is not None]
        tokens = self._sampler.draw(logits, [one.random for one in self.sequences], self.decoder.seen, counts)
        return [on_gpu[slot] if plain[slot] else token for slot, token in enumerate(tokens)]

    def _logprobs(self, logits: Tensor, tokens: list[int]) -> dict[int, Logprobs]:
        """Return those of the tokens by slot, for sequences with ``logprobs``."""
        asked = ((slot, one.request.logprobs) for slot, one in enumerate(self.sequences))
        wanted = {slot: count for slot, count in asked if count is not None}
        if not wanted:
            return {}
        slots = list(wanted)
        distributions = logits[slots].double().log_softmax(-1)
        own = distributions[range(len(slots)), [tokens[slot] for slot in slots]].tolist()
        top = distributions.topk(max(wanted.values()), dim=-1)
        found = zip(slots, own, top.indices.tolist(), top.values.tolist(), strict=True)
        return {
            slot: (logprob, tuple(zip(ids[: wanted[slot]], values[: wanted[slot]], strict=True)))
            for slot, logprob, ids, values in found
        }

    def _new_sampler(self, sequences: list[DecodingSequence]) -> Sampler:
        return Sampler([one.request.sampling for one in sequences], self.decoder.seen.device)
