"""State slots of sequences that decode side by side, and one step of all of them: in C, in Triton, or in PyTorch.

The decoder in C also reads short pieces of prompts, where that is faster than a call of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gecko.inference.packed_weights import Network, PackedWeights, decoder_of
from gecko.io.quantization import plain_tensors
from gecko.models.gecko import Gecko
from gecko.ops.common import identity
from gecko.runtime.process import prefer_huge_pages
from gecko.state import GeckoState

FIRST_SLOTS = 4
"""Slots that are allocated for the first sequence; their number doubles when all are in use."""
MOST_PRODUCTS = 2**29
"""Most products of weights and activations in a piece of a prompt that is read in steps. With more, a call of a model
of 16 M parameters is faster."""


class Decoder:
    """States of up to ``capacity`` sequences, which each step reads and changes in place.

    If the weights are float32, bfloat16 or quantised, a step on the CPU is one call into C for the whole network, and
    on a GPU one CUDA graph of Triton kernels, which draws the next tokens too. Other models take ``Gecko.step``, whose
    result is copied into the slots. The logits of a sequence do not depend on the others in C; elsewhere their last
    bits may. Empty slots cost no time, and memory only if as many were in use before. For use without gradients. Raise
    ValueError if ``window_dtype`` is given, and the model decodes neither in C nor in Triton.

    Args:
        window_dtype: dtype of the keys and values in the attention window, float32 or bfloat16, which halves most of a
            state; None: as in the model's own states. bfloat16 rounds them.
    """

    def __init__(self, model: Gecko, capacity: int, window_dtype: torch.dtype | None = None) -> None:
        self.capacity, self.count, self._window_dtype = capacity, 0, window_dtype
        self._model, self._device = model, model.embedding.weight.device
        if window_dtype is not None and decoder_of(model, model.empty_state()) is None:
            raise ValueError(
                "window_dtype needs a model that decodes in C or Triton: with weights in float32, bfloat16 or "
                "quantised, and on the CPU GCC. Leave window_dtype out."
            )
        self._all: GeckoState | None = None
        """All slots; ``_state``: those in use."""
        self._state: GeckoState | None = None
        self.backend: Literal["triton", "cpu"] | None = None
        """Whose kernels compute a step; None: ``Gecko.step``, or there was no sequence yet."""
        self._packed: PackedWeights | None = None
        self._network: Network | None = None
        self._ends: Hashable = None
        self._seen = torch.zeros(capacity, model.config.vocab_size, dtype=torch.bool, device=self._device)

    @property
    def seen(self) -> Tensor:
        """(count, V) bool, writable view: which tokens each sequence contains so far."""
        return self._seen[: self.count]

    def add(self, state: GeckoState, seen: Tensor) -> None:
        """Copy the state of one sequence into slot ``count``. Raise ValueError if other weights made the state."""
        assert self.count < self.capacity, "there must be a free slot"
        if not self.count:
            # No slot holds a state of earlier weights, so the weights may have changed.
            self._model.check_state(state, 1)
            self._all = replace(self._first_slots(state) if self._all is None else self._all, model=state.model)
            self._pack()
        assert self._all is not None
        # The name of weights that had gradients is unknown.
        known = state.model and self._all.model
        if state.config != self._all.config or (known and state.model != self._all.model):
            raise ValueError("states that decode side by side must be of one model; got states of different ones.")
        if self.count == self._all.batch_size:
            before, self._all = self._all, _new_slots(self._all, min(self.capacity, 2 * self.count))
            for slots, old in zip(self._all.tensors().values(), before.tensors().values(), strict=True):
                slots[: len(old)].copy_(old)
            self._network = None if self._packed is None else self._packed.with_states(self._all)
        for (name, slot), tensor in zip(self._all.tensors().items(), state.tensors().values(), strict=True):
            want = (1, *slot.shape[1:])
            if tensor.shape != want:  # a smaller one would be repeated
                raise ValueError(f"{name} of a state must have shape {want}; got {tuple(tensor.shape)}.")
            slot[self.count].copy_(tensor[0])
        self._seen[self.count].copy_(seen)
        self.resize(self.count + 1)

    def remove(self, slot: int) -> None:
        """Free ``slot``; the sequence in the last slot moves there."""
        last = self.count - 1
        if slot != last and self._all is not None:
            for tensor in (*self._all.tensors().values(), self._seen):
                tensor[slot].copy_(tensor[last])
        self.resize(last)

    def resize(self, count: int) -> None:
        """Set the number of slots in use."""
        self.count = count
        if self._all is not None:
            self._state = self._all.map(lambda x: x[:count])

    def state(self, slot: int) -> GeckoState:
        """Return a copy of the state in ``slot``, with one row, in the dtypes of the model's own states."""
        assert self._all is not None and slot < self.count, "the slot must be in use"
        dtypes = iter(self._dtypes)
        return self._all.map(lambda x: x[slot : slot + 1].to(next(dtypes), copy=True))

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token per sequence, by slot, and return the logits of the next ones, (count, V), which the next call
        may overwrite."""
        assert self._state is not None and len(tokens) == self.count, "there must be one token per sequence"
        if _ends(self._model) != self._ends:
            # Another change of the weights is only seen in the first step; checking all of them takes too long.
            self._model.check_state(self._state, self.count)
            self._pack()
        if self._network is None:
            logits, after = self._model.unchecked_step(torch.tensor(tokens, device=self._device), self._state)
            for slot, tensor in zip(self._state.tensors().values(), after.tensors().values(), strict=True):
                slot.copy_(tensor)
            return logits
        logits = self._network.step(tokens)
        self._state.clock.position.add_(1)
        return logits

    def hidden_step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token per sequence, by slot, and return the inputs of the head, (count, D) float32; only in C."""
        assert self._state is not None and self._network is not None and self.backend == "cpu", "only C has this step"
        hidden = self._network.hidden_step(tokens)
        self._state.clock.position.add_(1)
        return hidden

    def draw(self, logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int]) -> list[int]:
        """Return one token per row of ``logits``, by slot, or −1 if a logit is not finite; only in Triton.

        The logits of ``step`` cost one read of the host. A temperature of 0 takes the first of the most likely tokens.
        The random numbers of a sequence are a function of its seed and position.
        """
        assert self._network is not None and self.backend == "triton", "only a GPU draws by itself"
        return self._network.draw(logits, temperatures, seeds)

    def _first_slots(self, state: GeckoState) -> GeckoState:
        state = as_own(self._model, state)
        self._dtypes = [tensor.dtype for tensor in state.tensors().values()]
        if (dtype := self._window_dtype) is not None:
            state = state.with_window(dtype, dtype)
        return _new_slots(state, min(self.capacity, FIRST_SLOTS))

    def _pack(self) -> None:
        assert self._all is not None
        self._network = self._packed = None
        self.backend, self._ends = decoder_of(self._model, self._all), _ends(self._model)
        if self.backend is not None:
            self._packed = PackedWeights(self._model, self.backend)
            self._network = self._packed.with_states(self._all)


def as_own(model: Gecko, state: GeckoState) -> GeckoState:
    """Return a state on the model's device, with the attention window in the dtypes of the model's own states. A copy
    of the model in another dtype has the same fingerprint; its window would change slots and batches of others."""
    weight = model.embedding.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    if state.dtype not in (wide, None):
        return state  # ``Gecko.check_state`` refuses it
    return state.to(weight.device).with_window(*GeckoState.window_dtypes(model.config, wide, weight.dtype))


def read_piece(model: Gecko, tokens: Tensor, state: GeckoState | None) -> tuple[Tensor, GeckoState]:
    """Return what ``Gecko.hidden`` does for ``tokens`` (1, n), a piece of one sequence that follows ``state``. The
    decoder in C reads the tokens one by one if they are few and the weights are bfloat16: then a call of the model has
    no C kernels, and rounds activations. Errors are those of ``Gecko.hidden``."""
    count, dtype = tokens.shape[1], model.embedding.weight.dtype
    if count == 1 or dtype != torch.bfloat16 or count * sum(x.numel() for x in model.parameters()) > MOST_PRODUCTS:
        return model.hidden(tokens, state=state)
    before = model.empty_state() if state is None else state
    if decoder_of(model, before) != "cpu":
        return model.hidden(tokens, state=state)
    decoder = Decoder(model, 1)
    decoder.add(before, torch.zeros(model.config.vocab_size, dtype=torch.bool, device="cpu"))
    hidden = torch.cat([decoder.hidden_step([token]) for token in tokens[0].tolist()])
    return hidden.to(dtype).unsqueeze(0), decoder.state(0)


def _ends(model: Gecko) -> Hashable:
    """Return the identity of the first and last weights only. This is fast enough to check it at every token."""
    ends = (model.embedding.weight, model.head.weight)
    return identity(tensor for weight in ends for tensor in plain_tensors(weight))


def _new_slots(state: GeckoState, count: int) -> GeckoState:
    """Return a state of ``count`` rows with the sizes and dtypes of ``state``."""

    def zeros(like: Tensor) -> Tensor:
        slots = like.new_empty(count, *like.shape[1:])
        if slots.device.type == "cpu":
            prefer_huge_pages(slots.data_ptr(), slots.nbytes)  # a step reads most of them
        return slots.zero_()

    with torch.inference_mode(False):  # tensors of that mode can only be changed in it
        return state.map(zeros)
