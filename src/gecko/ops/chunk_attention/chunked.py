"""Attention patterns, and eager forms: over whole chunks for rows with the same offset, and for one token per row.

The ring buffer has 2c tokens, with position j in slot j mod 2c.
Over whole chunks, scores and softmax of one head at a time are in a reused scratch buffer, followed by one product with
the values. The backward pass computes the weights again: keeping them would cost T · 2c · H numbers per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.config import Attention
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import common_chunk_offset, padded
from gecko.ops.rotary import rotary_frequencies, rotary_phases, rotate
from gecko.runtime.private import softmax_gradient
from gecko.runtime.tensors import TensorRecord, to_device
from gecko.segments import Segments


@dataclass(frozen=True)
class Pattern:
    """One attention pattern. The window of a chunk of queries is that chunk and the ``lookback`` chunks before it.

    Fields are those of ``GeckoConfig``.
    """

    chunk_size: int
    attention: Attention = "sliding_chunk"
    rope_base: float = 500_000.0
    rope_heads: int | None = None
    rope_frequencies: tuple[float, ...] | None = None
    sinks: int = 0
    bfloat16_window: bool = False

    @property
    def lookback(self) -> int:
        return 0 if self.attention == "chunk" else 1

    @property
    def window(self) -> int:
        return (1 + self.lookback) * self.chunk_size

    def first_position(self, position: Tensor) -> Tensor:
        """Return the first position in the window of a query at ``position``."""
        if self.attention == "sliding_window":
            return position - self.chunk_size + 1
        return (position // self.chunk_size - self.lookback) * self.chunk_size

    def first_slot(self, place: Tensor) -> Tensor:
        """Return the first window slot that a query at ``place`` (0..c−1) of its chunk sees."""
        return place + 1 if self.attention == "sliding_window" else torch.zeros_like(place)

    def last_slot(self, place: Tensor) -> Tensor:
        """Return the query's own slot in its window."""
        return place + self.lookback * self.chunk_size

    def sink_turn(self, number: Tensor) -> Tensor:
        """Return the position by which the query with this number in its document is rotated for the sinks."""
        return number.clamp(max=2 * self.chunk_size - 1)

    def turned(self, heads: int) -> int:
        """Return how many of ``heads`` heads are rotated."""
        return heads if self.rope_heads is None else self.rope_heads

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, T, d) by ``positions`` that broadcast against (B, H, T)."""
        heads = self.turned(x.shape[1])
        return x if heads == 0 else rotate(x, self.phases(x, positions), heads)

    def phases(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the phases by which ``rotary.rotate`` rotates x (B, H, T, d)."""
        return rotary_phases(positions, self.frequencies(x.shape[-1]), x.dtype, x.device)

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angles by which a step turns the pairs of features, (d / 2,) float64 on the CPU."""
        if self.rope_frequencies is None:
            return rotary_frequencies(head_dim, self.rope_base)
        return torch.tensor(self.rope_frequencies, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class SinkTokens(TensorRecord):
    """Keys and values of the first tokens of the document of each row; zero where it has fewer.

    keys: (B, K, sinks, key_head_dim), rotated by their position in the document; values: (B, K, sinks, value_head_dim).
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class AttentionState(TensorRecord):
    """Keys and values of the last 2c tokens in a ring buffer: position j is in slot j mod 2c. K heads have them.

    keys: (B, K, 2c, key_head_dim), rotated by their position inside their chunk; float32 or wider after a call.
    values: (B, K, 2c, value_head_dim), in the dtype of the activations.
    sinks: None for patterns without sinks.
    """

    keys: Tensor
    values: Tensor
    sinks: SinkTokens | None = None

    @classmethod
    def empty(
        cls, batch: int, heads: int, chunk_size: int, key_dim: int, value_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, sinks: int = 0,
    ) -> AttentionState:  # fmt: skip
        def zeros(slots: int, width: int) -> Tensor:
            return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

        first = SinkTokens(zeros(sinks, key_dim), zeros(sinks, value_dim)) if sinks else None
        return cls(zeros(2 * chunk_size, key_dim), zeros(2 * chunk_size, value_dim), first)

    def to(self, keys: torch.dtype, values: torch.dtype) -> AttentionState:
        """Return the state with keys and values in these dtypes."""
        sinks = None if self.sinks is None else SinkTokens(self.sinks.keys.to(keys), self.sinks.values.to(values))
        return AttentionState(self.keys.to(keys), self.values.to(values), sinks)


def in_order(ring: Tensor, start: int, size: int) -> Tensor:
    """Roll the slots of the ring (B, H, size, d) so that slot ``start`` is first."""
    return ring if start % size == 0 else torch.roll(ring, -start, dims=2)


def ring_after(before: Tensor, new: Tensor, end: int, size: int) -> Tensor:
    """Return the ring after ``new`` tokens, which end before position ``end``. ``before`` is in order of time."""
    kept = min(new.shape[2], size)
    recent = torch.cat([before[:, :, kept:], new[:, :, new.shape[2] - kept :]], dim=2)
    return in_order(recent, -end, size)


Attended = tuple[Tensor, Tensor | None, AttentionState]
"""What a form returns: the output, log Σ exp(score) (B, H, T) for a pattern with sinks, and the state without them."""


FEW = 4
"""A call in one chunk of which it has at most a quarter is not padded to the whole chunk."""


def chunk_attention_chunked(
    pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> Attended:
    """Attend to the window, for rows with the same position mod 2c and a key for each head.

    The call is placed on a grid of n chunks. The first chunk starts with ``phase`` tokens of earlier calls.
    """
    q, k, v = inputs
    chunk, length = pattern.chunk_size, q.shape[2]
    ring_start = common_chunk_offset(segments, 2 * chunk)
    assert ring_start is not None, "rows must agree on their phase"
    phase = ring_start % chunk
    chunks = -(-(phase + length) // chunk)
    place = (phase + torch.arange(length, device="cpu")) % chunk
    empty = chunks * chunk - phase - length

    before_keys, before_values = (in_order(x, ring_start, 2 * chunk) for x in (state.keys, state.values))
    phases = segments.once(("phases", pattern, q.dtype), lambda: pattern.phases(q, place))
    unseen = 2 * chunk - pattern.lookback * chunk - phase
    queries, keys = (rotate(x, phases, pattern.turned(x.shape[1])) for x in (q, k))
    # The state may have a wider dtype than the values of a bfloat16 model, and a narrower one than the keys.
    before_keys, before_values = before_keys.to(k.dtype), before_values.to(v.dtype)
    keys = torch.cat([before_keys[:, :, unseen:], keys], dim=2)
    values = torch.cat([before_values[:, :, unseen:], v], dim=2)
    bias = partial(_bias, pattern, phase=phase, chunks=chunks, dtype=q.dtype)
    table, entry = segments.shared(("bias", pattern, q.dtype), bias)
    windows, laid = _windows(padded(keys, 0, empty), pattern), padded(values, 0, empty)
    held = slice(phase, phase + length)
    if chunks == 1 and FEW * length <= chunk:
        scores = queries @ windows[:, :, 0].mT + table[:, held][entry[:, 0]].unsqueeze(1)
        out = scores.softmax(-1).to(v.dtype) @ laid
        log_sums = scores.logsumexp(-1) if pattern.sinks else None
    else:
        out, log_sums = _WindowAttention.apply(
            padded(queries, phase, empty + pattern.lookback * chunk).reshape(-1, chunk, q.shape[-1]),
            windows.flatten(0, 2), laid.flatten(0, 2), table,
            entry.unsqueeze(1).expand(-1, q.shape[1], -1).reshape(-1), (*q.shape[:2], held), pattern.sinks > 0,
        )  # fmt: skip
    read = slice(keys.shape[2] - length, None)
    ring_keys = ring_after(before_keys, keys[:, :, read], ring_start + length, 2 * chunk)
    ring_values = ring_after(before_values, values[:, :, read], ring_start + length, 2 * chunk)
    return out, log_sums, AttentionState(ring_keys, ring_values)


def _windows(keys: Tensor, pattern: Pattern) -> Tensor:
    """Return the windows of keys, (B, H, n + lookback, w, d): the previous chunk rotated by −c, then the own chunk.
    With lookback, each head ends with a block of padding, so that all windows are evenly spaced."""
    own = keys.unflatten(2, (-1, pattern.chunk_size))
    if pattern.lookback == 0:
        return own
    back = torch.tensor([-pattern.chunk_size], device="cpu")
    previous = pattern.rotate(keys, back).unflatten(2, (-1, pattern.chunk_size))
    return torch.cat([previous, F.pad(own[:, :, 1:], (0, 0, 0, 0, 0, 1))], dim=3)


def _bias(pattern: Pattern, segments: Segments, phase: int, chunks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return additive masks as a table (masks, c, window) and the index of each block's mask, (B, n + lookback). Mask 0
    is the pattern alone. A block has another mask only if a document starts in its window."""
    chunk, (batch, length) = pattern.chunk_size, (segments.batch, segments.length)
    place = torch.arange(chunk, device="cpu")
    chunk_start = torch.arange(chunks, device="cpu")[:, None] * chunk
    base = segments.clock.position - phase
    starts = F.pad(segments.document_starts - base[:, None], (phase, chunks * chunk - phase - length), value=-(2**62))
    first = starts.unflatten(1, (chunks, chunk)) - chunk_start + pattern.lookback * chunk
    first = torch.maximum(first, pattern.first_slot(place))
    entry = torch.zeros(batch, chunks + pattern.lookback, dtype=torch.int64, device="cpu")
    if torch.compiler.is_exporting():  # nothing may be chosen by values, so every block has a mask
        own_firsts = first.flatten(0, 1)
        entry[:, :chunks] = torch.arange(1, batch * chunks + 1, device="cpu").view(batch, chunks)
    else:
        own = (first > pattern.first_slot(place)).any(-1)
        own_firsts = first[own]
        entry[:, :chunks][own] = torch.arange(1, len(own_firsts) + 1, device="cpu")
    firsts = torch.cat([pattern.first_slot(place).unsqueeze(0), own_firsts])
    slots = torch.arange(pattern.window, device="cpu")
    visible = (slots >= firsts.unsqueeze(-1)) & (slots <= pattern.last_slot(place).unsqueeze(-1))
    table = torch.zeros(visible.shape, dtype=dtype, device="cpu").masked_fill_(~visible, -torch.inf)
    return to_device(table, segments.device), to_device(entry, segments.device)


_SCRATCH = 2**18
"""Scores in memory at a time, per thread: they fit in a core's cache."""


class _WindowAttention(FirstOrder):
    """Compute softmax(q kᵀ + bias) v for the blocks of all heads and rows, in one list.

    q: (blocks, c, d); k: (blocks, w, d); v: (blocks · c, e), of which block i sees w rows starting at i · c;
    table: (masks, c, w); entry: (blocks,). With lookback, the last block has no full window: it must be padding.
    place: rows, heads, and the slice of each head that holds tokens of the call. The output has only these tokens,
    (rows, heads, length, e), so that no gradient of the padding is computed. Also returns the log of the sum of exp of
    the scores of each query, (rows, heads, length), if ``summed``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, entry: Tensor, place: tuple[int, int, slice],
        summed: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(q, k, v, table, entry)
        ctx.place = rows, heads, held = place
        out, log_sums = v.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(*q.shape[:2], 1)
        windows = _windows_of(v, k.shape[0], k.shape[1], q.shape[1])
        for piece in _pieces(len(windows), table[0].numel()):
            scores = _scores(q[piece], k[piece], table, entry[piece])
            if summed:
                log_sums[piece] = scores.logsumexp(-1, keepdim=True)
            torch.bmm(scores.softmax(-1).to(v.dtype), windows[piece], out=out[piece])
        taken = (x.view(rows, heads, -1, x.shape[-1])[:, :, held] for x in (out, log_sums))
        return next(taken), next(taken).squeeze(-1) if summed else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, table, entry = ctx.saved_tensors
        grad = _laid(grad, ctx.place, q)
        if grad_log_sums is not None:
            grad_log_sums = _laid(grad_log_sums.unsqueeze(-1), ctx.place, q)
        windows = _windows_of(v, k.shape[0], k.shape[1], q.shape[1])
        grad_q, grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        grad_q[len(windows) :], grad_k[len(windows) :] = 0, 0
        for piece in _pieces(len(windows), table[0].numel()):
            weights = _scores(q[piece], k[piece], table, entry[piece]).softmax(-1)
            _value_grad(weights.to(v.dtype), grad[piece], grad_v.view(-1, *grad.shape[1:]), piece.start)
            grad_weights = torch.bmm(grad[piece], windows[piece].mT).to(q.dtype)
            grad_scores = softmax_gradient(grad_weights, weights, -1, q.dtype)
            if grad_log_sums is not None:
                grad_scores.addcmul_(weights, grad_log_sums[piece])
            torch.bmm(grad_scores, k[piece], out=grad_q[piece])
            torch.bmm(grad_scores.mT, q[piece], out=grad_k[piece])
        return grad_q, grad_k, grad_v, None, None, None, None


def _pieces(blocks: int, scores: int) -> list[slice]:
    size = max(1, _SCRATCH * torch.get_num_threads() // scores)
    return [slice(begin, min(begin + size, blocks)) for begin in range(0, blocks, size)]


def _scores(q: Tensor, k: Tensor, table: Tensor, entry: Tensor) -> Tensor:
    return table.index_select(0, entry).baddbmm_(q, k.mT)


def _windows_of(v: Tensor, blocks: int, window: int, chunk: int) -> Tensor:
    """Return overlapping views (full windows, w, e) of v (blocks · c, e), which must be contiguous."""
    width = v.shape[1]
    return v.as_strided((blocks + 1 - window // chunk, window, width), (chunk * width, width, 1))


def _laid(grad: Tensor, place: tuple[int, int, slice], q: Tensor) -> Tensor:
    """Return the gradient of an output as blocks (blocks, c, width), with zeros in the padding."""
    rows, heads, held = place
    laid = grad.new_empty(rows, heads, q.shape[0] * q.shape[1] // (rows * heads), grad.shape[-1])
    laid[:, :, : held.start], laid[:, :, held.stop :] = 0, 0
    laid[:, :, held] = grad
    return laid.view(*q.shape[:2], grad.shape[-1])


def _value_grad(weights: Tensor, grad_out: Tensor, grad_v: Tensor, first: int) -> None:
    """Add the gradients of each chunk of values, grad_v (blocks, c, e), from every window that contains it.

    Pieces come in order, so a chunk is first the last one of a window: this gradient is written, later ones are added.
    """
    count, chunk = grad_out.shape[:2]
    lookback = weights.shape[2] // chunk - 1
    if first == 0:
        grad_v[:lookback] = 0
    own = slice(first + lookback, first + lookback + count)
    torch.bmm(weights[:, :, lookback * chunk :].mT, grad_out, out=grad_v[own])
    for part in range(lookback):
        seen = weights[:, :, part * chunk : (part + 1) * chunk]
        grad_v[first + part : first + part + count].baddbmm_(seen.mT, grad_out)


def chunk_attention_step(
    pattern: Pattern, inputs: tuple[Tensor, ...], state: AttentionState, segments: Segments
) -> Attended:
    """Attend to the window with one token per row: write it to the ring, then attend to both halves of the ring.

    For keys of its own chunk, the query is rotated by its place in the chunk; for those of the other half, by c more.
    """
    q, k, v = inputs
    build = partial(_AttentionToken.of, pattern, width=q.shape[-1], dtype=q.dtype)
    token = segments.shared(("token", pattern, q.dtype, q.shape[-1]), build)
    turned_key = rotate(k, token.key_phases, pattern.turned(k.shape[1]))
    keys = state.keys.to(q.dtype).scatter(2, token.slot.expand_as(k), turned_key)
    values = state.values.to(v.dtype).scatter(2, token.slot.expand_as(v), v)
    turned = rotate(q.expand(-1, -1, 2, -1), token.query_phases, pattern.turned(q.shape[1]))
    # A row times a matrix: on CPUs, a matrix times a column takes several times as long.
    scores = (turned.unsqueeze(-2) @ keys.unflatten(2, (2, -1)).mT).flatten(2) + token.bias
    out = scores.softmax(-1).to(v.dtype).unsqueeze(2) @ values
    log_sums = scores.logsumexp(-1, keepdim=True) if pattern.sinks else None
    return out, log_sums, AttentionState(keys, values)


@dataclass(frozen=True)
class _AttentionToken:
    """Values that depend on the position of one token per row. They are the same in all layers."""

    slot: Tensor
    """(B, 1, 1, 1): slot of the token in the ring."""
    key_phases: Tensor
    """(B, 1, 1, d / 2)"""
    query_phases: Tensor
    """(B, 1, 2, d / 2), by half of the ring."""
    bias: Tensor
    """(B, 1, 2c): 0 for slots of the ring that the query sees, else −∞."""

    @classmethod
    def of(cls, pattern: Pattern, segments: Segments, width: int, dtype: torch.dtype) -> _AttentionToken:
        chunk, position, device = pattern.chunk_size, segments.clock.position.unsqueeze(1), segments.device
        place, own_half = position % chunk, position // chunk % 2
        turns = place + chunk * (torch.arange(2, device="cpu") != own_half)
        key_phases, query_phases = (
            rotary_phases(positions, pattern.frequencies(width), dtype, device)[:, None] for positions in (place, turns)
        )
        slot = (position % (2 * chunk)).to(device).view(-1, 1, 1, 1)
        held = position - (position - torch.arange(2 * chunk, device="cpu")) % (2 * chunk)
        unseen = held < torch.maximum(pattern.first_position(position), segments.document_starts)
        bias = torch.zeros(unseen.shape, dtype=dtype, device="cpu").masked_fill_(unseen, -torch.inf)
        return cls(slot, key_phases, query_phases, bias.to(device).unsqueeze(1))
