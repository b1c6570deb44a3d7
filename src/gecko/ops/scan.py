"""Linear recurrences over chunks, and scan plans, which divide a call into chunks of single documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import padded
from gecko.runtime.tensors import to_device
from gecko.segments import Segments

SCAN_CHUNK = 64
"""Steps per matrix product (a tuning constant)."""


@dataclass(frozen=True)
class Slots:
    """Mapping between the tokens of a call and the slots of its chunks. Each chunk has ``chunk`` slots."""

    token_of_slot: Tensor
    """(slots,) flat token index of each slot; arbitrary for empty slots."""
    empty: Tensor
    """Indices of the slots without a token."""
    slot_of_token: Tensor
    """(tokens,) slot of each token."""

    def filled(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.token_of_slot).index_fill_(0, self.empty, 0)


@dataclass(frozen=True)
class ScanPlan:
    """Division of a call into scan chunks of at most ``chunk`` steps. A chunk holds tokens of one document only.

    Level j holds the j-th chunk of every document. A level depends only on the level before, so all documents are
    processed in parallel, and the number of sequential steps is the number of chunks of the longest document. Documents
    are sorted by length, so the chunks of level j + 1 continue the first chunks of level j.
    """

    chunk: int
    batch: int
    length: int
    level_sizes: tuple[int, ...]
    slots: Slots | None
    """None if no document starts in the call: then the chunks of each row are consecutive."""
    row_of_run: Tensor
    run_continues: Tensor
    last_chunk: Tensor
    """(batch,) index of the chunk that holds each row's last token."""
    last_length: Tensor
    """(batch,) tokens in that chunk."""

    @classmethod
    def of(cls, segments: Segments) -> ScanPlan:
        """Return the plan of a call. It is computed once for all layers."""
        return segments.shared("scan", cls.of_rows if segments.starts is None else cls.of_documents)

    @classmethod
    def of_rows(cls, segments: Segments) -> ScanPlan:
        batch, length, device = segments.batch, segments.length, segments.device
        chunk = min(SCAN_CHUNK, length)
        levels = -(-length // chunk)
        rows = torch.arange(batch, device=device)
        last_length = length - (levels - 1) * chunk
        return cls(
            chunk, batch, length, (batch,) * levels, None, rows,
            torch.ones(batch, dtype=torch.bool, device=device),
            rows * levels + levels - 1,
            torch.full((batch,), last_length, device=device),
        )  # fmt: skip

    @classmethod
    def of_documents(cls, segments: Segments) -> ScanPlan:
        batch, length, device = segments.batch, segments.length, segments.device
        runs = sorted(segments.spans, key=lambda run: -run.length)
        lengths = np.array([run.length for run in runs])
        rows = np.array([run.row for run in runs])
        begins = np.array([run.begin for run in runs])
        chunk = int(min(SCAN_CHUNK, lengths.max()))
        counts = -(-lengths // chunk)
        level_sizes = tuple(int((counts > level).sum()) for level in range(counts[0]))
        first_slot = np.concatenate([[0], np.cumsum(level_sizes)])

        level = np.concatenate([np.full(size, j) for j, size in enumerate(level_sizes)])
        run = np.concatenate([np.arange(size) for size in level_sizes])
        step = level[:, None] * chunk + np.arange(chunk)
        token = rows[run, None] * length + begins[run, None] + step
        held = (step < lengths[run, None]).reshape(-1)
        token = np.where(held, token.reshape(-1), 0)
        slot_of_token = np.empty(batch * length, dtype=np.int64)
        slot_of_token[token[held]] = np.flatnonzero(held)

        is_last = begins + lengths == length
        last_run = np.empty(batch, dtype=np.int64)
        last_run[rows[is_last]] = np.flatnonzero(is_last)
        last_level = counts[last_run] - 1
        last_length = lengths[last_run] - last_level * chunk

        def on_device(array: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(array), device)

        return cls(
            chunk, batch, length, level_sizes,
            Slots(on_device(token), on_device(np.flatnonzero(~held)), on_device(slot_of_token)),
            on_device(rows), to_device(torch.tensor([run.continues for run in runs], device="cpu"), device),
            on_device(first_slot[last_level] + last_run), on_device(last_length),
        )  # fmt: skip

    def fold(self, x: Tensor) -> Tensor:
        """Convert (batch, length, features) to (features, chunks, chunk), with zeros in empty slots."""
        features = x.shape[-1]
        if self.slots is not None:
            flat = _Moved.apply(x.reshape(-1, features), self.slots, True)
        else:
            flat = padded(x, 0, len(self.level_sizes) * self.chunk - self.length).reshape(-1, features)
        return _Transposed.apply(flat).view(features, -1, self.chunk)

    def unfold(self, y: Tensor) -> Tensor:
        """Convert (features, chunks, chunk) back to (batch, length, features)."""
        flat = _Transposed.apply(y.flatten(1))
        if self.slots is not None:
            return _Moved.apply(flat, self.slots, False).view(self.batch, self.length, -1)
        whole = flat.view(self.batch, -1, y.shape[0])
        return whole if whole.shape[1] == self.length else whole[:, : self.length]

    def levels(self, h: Tensor) -> list[Tensor]:
        """Return views of h (features, chunks, …), one for each level."""
        if self.slots is None:
            return list(h.unflatten(1, (self.batch, -1)).unbind(2))
        return list(h.split(self.level_sizes, dim=1))

    def tail(self, x: Tensor) -> Tensor:
        """Return the last chunk of each row of x (batch, length, features), aligned to the end of (batch, chunk,
        features) with zeros before."""
        slot = torch.arange(-self.chunk, 0, device=x.device)
        held = (slot >= -self.last_length.unsqueeze(1)).unsqueeze(-1)
        return x[:, self.length - self.chunk :] * held.to(x.dtype)

    def initial(self, state: Tensor) -> Tensor:
        """Return the initial state of each document, (runs, …), from the states before the call (batch, …). It is zero
        for a document that starts in the call."""
        if self.slots is None:
            return state
        chosen = state.index_select(0, self.row_of_run)
        return chosen * self.run_continues.view(-1, *[1] * (state.dim() - 1)).to(state.dtype)


class _Transposed(torch.autograd.Function):
    """Transpose a matrix, and its gradient, in memory: with strided operands, batched products run one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.t().contiguous()


class _Moved(FirstOrder):
    """Copy rows (tokens, features) to slots, or back. The backward pass is the opposite copy, without sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots, to_slots: bool) -> Tensor:
        ctx.slots, ctx.to_slots = slots, to_slots
        return slots.filled(x) if to_slots else x.index_select(0, slots.slot_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        slots = ctx.slots
        return grad.index_select(0, slots.slot_of_token) if ctx.to_slots else slots.filled(grad), None, None


class ChunkStates(FirstOrder):
    """Compute the state at the start of every scan chunk, h_{j+1} = decay · h_j + update_j along a document.

    updates: (features, chunks, modes), real or complex, as the result; decay: (features, modes), over a whole chunk;
    initial: (features, runs, modes), before the first chunk of each document.
    """

    @staticmethod
    def forward(ctx: Any, updates: Tensor, decay: Tensor, initial: Tensor, plan: ScanPlan) -> Tensor:
        states = torch.empty_like(updates)
        levels, sources, factor = plan.levels(states), plan.levels(updates), decay.unsqueeze(1)
        levels[0].copy_(initial)
        for j in range(len(levels) - 1):
            size = levels[j + 1].shape[1]
            torch.addcmul(sources[j][:, :size], factor, levels[j][:, :size], out=levels[j + 1])
        ctx.plan = plan
        ctx.save_for_backward(states, decay)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        states, decay = ctx.saved_tensors
        total = grad.clone(memory_format=torch.contiguous_format)
        grad_updates = torch.zeros_like(states)
        totals, sinks = ctx.plan.levels(total), ctx.plan.levels(grad_updates)
        factor = decay.conj().resolve_conj().unsqueeze(1)
        for j in range(len(totals) - 2, -1, -1):
            size = totals[j + 1].shape[1]
            sinks[j][:, :size].copy_(totals[j + 1])
            totals[j][:, :size].addcmul_(factor, totals[j + 1])
        grad_decay = (grad_updates * states.conj()).sum(1)
        return grad_updates, grad_decay, totals[0].clone(), None


def decayed_sum(x: Tensor, decay: Tensor, initial: Tensor, plan: ScanPlan) -> Tensor:
    """Compute s_t = decay · s_{t-1} + x_t per feature, starting from ``initial`` or, at document starts, from zero.

    Args:
        x: (batch, length, features); decay: (features,) in [0, 1], float64; initial: (batch, features).

    Returns:
        s_t for all steps, (batch, length, features).
    """
    steps = torch.arange(plan.chunk, device=x.device)
    powers = (decay[:, None] ** torch.arange(plan.chunk + 1, device=x.device)).to(x.dtype)
    kernel = torch.where(steps >= steps[:, None], powers[:, (steps - steps[:, None]).clamp(min=0)], 0)
    folded = plan.fold(x)
    within = torch.bmm(folded, kernel)
    start = plan.initial(initial).t().unsqueeze(-1)
    carried = ChunkStates.apply(within[:, :, -1:], powers[:, -1:], start, plan)
    return plan.unfold(torch.baddbmm(within, carried, powers[:, None, 1:]))
