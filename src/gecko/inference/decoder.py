"""Decode one or several sequences in a batch: ``Decoder`` holds their states, ``TokenStream`` samples their tokens."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gecko.inference.packed_weights import PackedWeights, decodes_in_c
from gecko.inference.prefill import Prefill, inference, read
from gecko.inference.sampling import Sampler, Sampling, finite_rows, not_finite
from gecko.models.gecko import Gecko
from gecko.ops.decoding.cpu import Network
from gecko.state import GeckoState

T = TypeVar("T")
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
        with inference(model):
            self._decoder = Decoder(model, len(prefills))
            for prefill in prefills:
                self._decoder.add(prefill.state, prefill.seen)
        self._logits = torch.stack([prefill.logits for prefill in prefills])
        self._active = [_Sequence(i, torch.Generator().manual_seed(seed)) for i, seed in enumerate(seeds)]
        """The sequences that are not finished, by slot of the decoder."""
        self._pending_tokens: list[int] = []
        """Token generated last of each active sequence, which its state has not read yet; empty before the first."""
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
        slots = {row.index: slot for slot, row in enumerate(self._active)}
        rows = {**self._finished, **{index: self._finish_row(slot) for index, slot in slots.items()}}
        with inference(self._model):
            stacked = GeckoState.stack([self._final_state(rows[row]) for row in sorted(rows)])
        # Tensors cloned outside inference mode can take part in autograd.
        return stacked.map(torch.clone)

    def stop(self, row: int) -> None:
        """Finish a row; no effect if it is finished already."""
        self._retire({slot: "stop" for slot, live in enumerate(self._active) if live.index == row})

    def _step(self) -> list[NewToken]:
        """Generate the next token of every active row; only this reads the tokens of the step before."""
        with inference(self._model):
            if self._pending_tokens:
                self._logits = self._decoder.step(self._pending_tokens)
                # The state has read them now, even if drawing the next tokens fails.
                self._pending_tokens = []
            self._pending_tokens = self._draw()
        generated: list[NewToken] = []
        finished: dict[int, FinishReason] = {}
        for slot, (row, token) in enumerate(zip(self._active, self._pending_tokens, strict=True)):
            if token in self._stop_tokens:
                finished[slot] = "stop"
                continue
            row.generated += 1
            generated.append(NewToken(row.index, token))
            if row.generated == self._max_new_tokens:
                finished[slot] = "length"
        self._retire(finished)
        return sorted(generated)

    def _draw(self) -> list[int]:
        finite = finite_rows(self._logits)
        if not bool(finite.all()):
            slot = int((~finite).nonzero()[0])
            raise ValueError(f"row {self._active[slot].index}: {not_finite(self._logits[slot])}")
        seen = self._decoder.seen
        tokens = self._sampler.draw(self._logits, [row.generator for row in self._active], seen)
        if self._sampler.uses_history:
            seen[range(len(tokens)), tokens] = True
        return tokens

    def _new_sampler(self) -> Sampler:
        return Sampler([self._sampling] * len(self._active), self._logits.device)

    def _retire(self, finished: dict[int, FinishReason]) -> None:
        """Remove the sequences in some slots of the decoder."""
        # In descending order, so that the sequence that moves into a freed slot is one that stays.
        for slot in sorted(finished, reverse=True):
            row = self._active[slot]
            self._finished[row.index], self._reasons[row.index] = self._finish_row(slot), finished[slot]
            with inference(self._model):
                self._decoder.remove(slot)
            _remove_from(self._active, slot)
            if self._pending_tokens:
                _remove_from(self._pending_tokens, slot)
            else:  # the logits of the prompts are still needed
                kept = list(range(len(self._logits)))
                _remove_from(kept, slot)
                self._logits = self._logits[kept]
        if finished and self._active:
            self._sampler = self._new_sampler()

    def _finish_row(self, slot: int) -> _Finished:
        pending_token = self._pending_tokens[slot : slot + 1]
        with inference(self._model):
            state = self._decoder.state(slot)
        return _Finished(state, [token for token in pending_token if token not in self._stop_tokens])

    def _final_state(self, row: _Finished) -> GeckoState:
        if not row.pending_token:
            return row.state
        return read(self._model, [torch.tensor(row.pending_token)], row.state).state


def _remove_from(values: list[T], place: int) -> None:
    """Remove one value; the last one moves to its place."""
    last = values.pop()
    if place < len(values):
        values[place] = last


class Decoder:
    """States of up to ``capacity`` sequences, which each step reads and changes in place.

    On the CPU a step is one call into C for the whole network, if the weights are float32, bfloat16 or quantised. Other
    weights and devices take ``Gecko.step``. The logits of a sequence do not depend on the others in C; in PyTorch their
    last bits may. Empty slots cost memory but no time. For use without gradients.
    """

    def __init__(self, model: Gecko, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self._model, self._device = model, model.embedding.weight.device
        self._all: GeckoState | None = None
        self._state: GeckoState | None = None
        self._network: Network | None = None
        self._ends: Hashable = None
        self._seen = torch.zeros(capacity, model.config.vocab_size, dtype=torch.bool, device=self._device)

    @property
    def seen(self) -> Tensor:
        """(count, V) bool, writable view: which tokens each sequence contains so far."""
        return self._seen[: self.count]

    @property
    def runs_in_c(self) -> bool:
        """Whether a step is one call into C."""
        return self._network is not None

    def add(self, state: GeckoState, seen: Tensor) -> None:
        """Copy the state of one sequence into slot ``count``."""
        assert self.count < self.capacity, "there must be a free slot"
        if not self.count:
            # No slot holds a state of earlier weights, so the weights may have changed.
            self._prepare(state)
        assert self._all is not None
        for slot, tensor in zip(self._all.tensors().values(), state.tensors().values(), strict=True):
            slot[self.count].copy_(tensor[0])
        self._seen[self.count].copy_(seen)
        self._resize(self.count + 1)

    def remove(self, slot: int) -> None:
        """Free ``slot``; the sequence in the last slot moves there."""
        last = self.count - 1
        if slot != last and self._all is not None:
            for tensor in (*self._all.tensors().values(), self._seen):
                tensor[slot].copy_(tensor[last])
        self._resize(last)

    def state(self, slot: int) -> GeckoState:
        """Return a copy of the state in ``slot``, with one row."""
        assert self._all is not None and slot < self.count, "the slot must be in use"
        return self._all.map(lambda x: x[slot : slot + 1].clone())

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token per sequence, by slot, and return the logits of the next ones, (count, V).

        The next call may overwrite the logits.
        """
        assert self._state is not None and len(tokens) == self.count, "there must be one token per sequence"
        if self._network is None:
            logits, after = self._model.step(torch.tensor(tokens, device=self._device), self._state)
            for slot, tensor in zip(self._state.tensors().values(), after.tensors().values(), strict=True):
                if tensor is not slot:
                    slot.copy_(tensor)
            return logits
        if self._model.ends() != self._ends:
            # Another change of the weights is only seen in the first step; checking all of them takes too long.
            self._model.check_state(self._state, self.count)
            self._pack()
        clock = self._state.clock
        positions = clock.position.numpy()
        logits = self._network.step(tokens, positions, clock.document_start.numpy())
        positions += 1
        return logits

    def _prepare(self, state: GeckoState) -> None:
        """Allocate the slots for states like ``state``, unless there are some, and pack the weights."""
        if self._all is None:
            self._all = state.map(lambda x: x.new_zeros(self.capacity, *x.shape[1:]))
        self._all = replace(self._all, model=state.model)
        self._pack()

    def _pack(self) -> None:
        assert self._all is not None
        self._network = None
        if decodes_in_c(self._model, self._all):
            self._network = PackedWeights(self._model).with_states(self._all)
            self._ends = self._model.ends()

    def _resize(self, count: int) -> None:
        self.count = count
        if self._all is not None:
            self._state = replace(self._all.map(lambda x: x[:count]), exclusive=True)
