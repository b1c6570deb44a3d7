"""Decode one or several sequences in a batch: ``TokenStream``, and the preallocated ``StateSlots`` of the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gecko.inference.prefill import Prefill, inference, read
from gecko.inference.sampling import Sampler, Sampling, finite_rows, not_finite
from gecko.models.gecko import Gecko
from gecko.state import GeckoState

FinishReason = Literal["length", "stop"]
"""``length``: ``max_new_tokens`` were generated. ``stop``: a stop token was drawn, or ``TokenStream.stop`` called."""


class NewToken(NamedTuple):
    """A generated token and the index of its sequence."""

    row: int
    token: int


@dataclass
class _Sequence:
    """A sequence in the decoding batch."""

    index: int
    generator: torch.Generator
    generated: int = 0


@dataclass(frozen=True)
class _Finished:
    """State of a finished sequence, and its last token if the state has not read it yet."""

    state: GeckoState
    pending_token: list[int]


def check_options(model: Gecko, sampling: Sampling, max_new_tokens: int) -> None:
    """Check the options of a stream before prompts are prefilled.

    Raises:
        ValueError: ``max_new_tokens`` or an id of the logit bias is out of range for ``model``.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0; got {max_new_tokens}.")
    sampling.check_ids(model.config.vocab_size)


class TokenStream:
    """Iterator over the tokens that continue prefilled sequences; each step yields its tokens in the order of rows.

    The sequences are decoded in one batch, each at its own position, and leave the batch when they are finished. The
    tokens of a sequence depend on its own prefill and seed only. A stop token is neither yielded nor read.

    Args:
        prefills: one per row.
        seeds: one per row; a row draws one random number per token.
        max_new_tokens: maximum number of tokens per row, at least 0.

    Raises:
        ValueError: a number is out of range; while iterating, logits are not finite.
    """

    def __init__(
        self,
        model: Gecko,
        prefills: Sequence[Prefill],
        *,
        seeds: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_tokens: Collection[int] = (),
    ) -> None:
        check_options(model, sampling, max_new_tokens)
        self._model, self._sampling = model, sampling
        self._max_new_tokens, self._stop_tokens = max_new_tokens, frozenset(stop_tokens)
        self._state = GeckoState.stack([prefill.state for prefill in prefills])
        self._logits = torch.stack([prefill.logits for prefill in prefills])
        self._seen = torch.stack([prefill.seen for prefill in prefills])
        self._pending_tokens: list[int] = []
        self._active = [_Sequence(i, torch.Generator().manual_seed(seed)) for i, seed in enumerate(seeds)]
        self._sampler = self._new_sampler()
        self._finished: dict[int, _Finished] = {}
        self._reasons: dict[int, FinishReason] = {}
        if max_new_tokens == 0:
            self._retire(dict.fromkeys(range(len(seeds)), "length"))

    def __iter__(self) -> Iterator[NewToken]:
        while self._active:
            yield from self._step()

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """One per row; None if the row is not finished."""
        return [self._reasons.get(row) for row in range(len(self._reasons) + len(self._active))]

    @property
    def state(self) -> GeckoState:
        """State of every row after all of its tokens so far; one model call per row reads its last token."""
        places = {row.index: place for place, row in enumerate(self._active)}
        rows = {**self._finished, **{index: self._finish_row(place) for index, place in places.items()}}
        with inference(self._model):
            stacked = GeckoState.stack([self._final_state(rows[row]) for row in sorted(rows)])
        # Tensors cloned outside inference mode can take part in autograd.
        return stacked.map(torch.clone)

    def stop(self, row: int) -> None:
        """Finish a row; no effect if it is finished already."""
        self._retire({place: "stop" for place, live in enumerate(self._active) if live.index == row})

    def _step(self) -> list[NewToken]:
        """Generate the next token of every row in the batch; only this reads the tokens of the step before."""
        with inference(self._model):
            if self._pending_tokens:
                tokens = torch.tensor(self._pending_tokens, device=self._logits.device)
                self._logits, self._state = self._model.step(tokens, self._state)
                # The state has read them now, even if drawing the next tokens fails.
                self._pending_tokens = []
            self._pending_tokens = self._draw()
        generated: list[NewToken] = []
        finished: dict[int, FinishReason] = {}
        for place, (row, token) in enumerate(zip(self._active, self._pending_tokens, strict=True)):
            if token in self._stop_tokens:
                finished[place] = "stop"
                continue
            row.generated += 1
            generated.append(NewToken(row.index, token))
            if row.generated == self._max_new_tokens:
                finished[place] = "length"
        self._retire(finished)
        return generated

    def _draw(self) -> list[int]:
        finite = finite_rows(self._logits)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise ValueError(f"row {self._active[row].index}: {not_finite(self._logits[row])}")
        tokens = self._sampler.draw(self._logits, [row.generator for row in self._active], self._seen)
        if self._sampler.uses_history:
            self._seen[range(len(tokens)), tokens] = True
        return tokens

    def _new_sampler(self) -> Sampler:
        return Sampler([self._sampling] * len(self._active), self._logits.device)

    def _retire(self, finished: dict[int, FinishReason]) -> None:
        """Remove rows, given by their place in the batch."""
        if not finished:
            return
        for place, reason in finished.items():
            index = self._active[place].index
            self._finished[index], self._reasons[index] = self._finish_row(place), reason
        kept = [place for place in range(len(self._active)) if place not in finished]
        self._active = [self._active[place] for place in kept]
        self._pending_tokens = [self._pending_tokens[place] for place in kept if self._pending_tokens]
        if kept:
            self._state = self._state.rows(kept)
            self._logits, self._seen = self._logits[kept], self._seen[kept]
            self._sampler = self._new_sampler()

    def _finish_row(self, place: int) -> _Finished:
        pending_token = self._pending_tokens[place : place + 1]
        return _Finished(
            self._state.rows([place]), [token for token in pending_token if token not in self._stop_tokens]
        )

    def _final_state(self, row: _Finished) -> GeckoState:
        if not row.pending_token:
            return row.state
        return read(self._model, [torch.tensor(row.pending_token)], row.state).state


class StateSlots:
    """Preallocated states of up to ``capacity`` sequences, of which the first ``count`` rows are in use.

    A step works on views of the used rows, so empty slots cost nothing. When a sequence is removed, the last one moves
    into its slot. For use without gradients.
    """

    def __init__(self, model: Gecko, capacity: int) -> None:
        device = model.embedding.weight.device
        # A state returned by the model has the dtypes that its steps write.
        _, state = model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=device))
        self._all = state.map(lambda x: x.new_zeros(capacity, *x.shape[1:]))
        self._seen = torch.zeros(capacity, model.config.vocab_size, dtype=torch.bool, device=device)
        self.capacity = capacity
        self._resize(0)

    @property
    def seen(self) -> Tensor:
        """(count, V) bool, writable view: which tokens each sequence contains so far."""
        return self._seen[: self.count]

    def add(self, state: GeckoState, seen: Tensor) -> None:
        """Copy the state of one sequence into slot ``count``."""
        assert self.count < self.capacity, "there must be a free slot"
        if not self.count:
            # No slot holds a state of earlier weights, so the weights may have changed.
            self._all = replace(self._all, model=state.model)
        for slot, tensor in zip(self._all.tensors().values(), state.tensors().values(), strict=True):
            slot[self.count].copy_(tensor[0])
        self._seen[self.count].copy_(seen)
        self._resize(self.count + 1)

    def remove(self, slot: int) -> None:
        """Free ``slot``; the sequence in the last slot moves there."""
        last = self.count - 1
        if slot != last:
            for tensor in (*self._all.tensors().values(), self._seen):
                tensor[slot].copy_(tensor[last])
        self._resize(last)

    def update(self, state: GeckoState) -> None:
        """Copy the tensors of ``state`` that the step did not write in place."""
        for slot, tensor in zip(self._tensors, state.tensors().values(), strict=True):
            if tensor is not slot:
                slot.copy_(tensor)

    def _resize(self, count: int) -> None:
        self.count = count
        self.state = replace(self._all.map(lambda x: x[:count]), exclusive=True)
        """Views of the used rows, which a step reads and writes."""
        self._tensors = list(self.state.tensors().values())
