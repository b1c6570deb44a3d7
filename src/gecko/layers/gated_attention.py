"""Mixer layer: attention gated by a moving average, with a working memory (paper Eq. 5–8, 16)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers import CEMA, RMSNorm, Terms, block_norm, linear, project
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, sinks_after, state_before
from gecko.ops.common import compute_dtype
from gecko.ops.gates import by_head, gated, silu_by_head
from gecko.ops.norms import group_rms_norm, norm_adds
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.short_convolution import short_convolution
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState, chunk_weights, memory_state_before, start_working_memory
from gecko.runtime.tensors import TensorRecord, to_device
from gecko.segments import Pending, Segments


@dataclass(frozen=True)
class MixerState(TensorRecord):
    """State of one mixer. What an architecture does not have is None."""

    norm: TimestepNormState | None
    cema: Tensor | None
    attention: AttentionState
    memory: WorkingMemoryState | None
    convolution: Tensor | None = None


Heads = tuple[AttentionState | None, WorkingMemoryState | None]
"""States of attention and memory before the first token of a call."""
Gates = tuple[Tensor | None, ...]
"""Gates before their activations: of the output (B, T, value_dim), and between attention and memory."""


class GatedAttention(nn.Module):
    """x + (W_h1 mx + b) + W_h2 (attention(q, k, v) · r + memory(qm, km, v)).

    xn = TimestepNorm(x), mx = RMSNorm(CEMA(xn)), v = silu(W_v xn + b), r = silu(W_r mx + b). q, k, qm and km are scaled
    and shifted copies of one normalised vector per head, W_z mx + b. Fields of the config change or remove parts.
    """

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.config = config
        model_dim, key_dim, value_dim = config.model_dim, config.key_dim, config.value_dim
        self.pattern = Pattern(
            config.chunk_size, config.attention, config.rope_base, config.rope_heads, config.rope_frequencies,
            config.sinks, config.bfloat16_window,
        )  # fmt: skip
        separate, own_heads = config.queries_and_keys == "separate", config.num_key_value_heads
        own_keys, own_values = own_heads * config.key_head_dim, own_heads * config.value_head_dim
        self.norm = block_norm(config)
        self.cema = self.cema_norm = None
        if config.local_mixing == "cema":
            self.cema = CEMA(model_dim, config.cema_modes, config.cema_skip, expansion=config.cema_expansion)
            self.cema_norm = RMSNorm(config)
        self.to_shared = None if separate else linear(model_dim, key_dim, bias=True)
        self.to_query = linear(model_dim, key_dim, bias=config.query_key_bias) if separate else None
        self.to_key = linear(model_dim, own_keys, bias=config.query_key_bias) if separate else None
        self.to_value = linear(model_dim, own_values, bias=True)
        self.to_gate = None if config.gate == "none" else linear(model_dim, value_dim, bias=config.gate_bias)
        channels = config.num_heads * config.memory_gate_channels
        self.to_memory_gate = linear(model_dim, channels, bias=config.gate_bias) if channels else None
        self.to_hidden = linear(model_dim, model_dim, bias=True) if config.hidden_branch else None
        self.to_output = linear(value_dim, model_dim, bias=False)
        self.query_norm = RMSNorm(config, key_dim, config.num_heads) if config.query_key_norm else None
        self.key_norm = RMSNorm(config, own_keys, own_heads) if config.query_key_norm else None
        self.memory_factor = self.taps = self.scale = self.offset = None
        if config.memory_factor is not None:
            self.memory_factor = nn.Parameter(torch.full((config.num_heads,), float(config.memory_factor)))
        if config.convolution_width:
            self.taps = nn.Parameter(torch.zeros(key_dim + own_keys + own_values, config.convolution_width))
            nn.init.trunc_normal_(self.taps, std=0.1, a=-0.3, b=0.3)
        if not separate:
            rows = 2 if config.memory == "none" else 4
            self.scale, self.offset = (nn.Parameter(torch.zeros(rows, key_dim)) for _ in range(2))
            nn.init.constant_(self.scale[2:], config.memory_key_length - 1)

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState | None]:
        """Return y of the shape of x, (B, T, D), and the state after the last token; None if the call keeps none."""
        terms, after = self.terms(x, state, segments)
        return reduce(add, terms), after

    def terms(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Terms, MixerState | None]:
        """Return tensors whose sum is y, and the state after the last token; None if the call keeps none.

        States that come from other ranks are sent as early and waited for as late as possible, so their exchange
        overlaps with the values, with gate and hidden projection, and with attention.
        """
        xn, norm = self.norm(x, None if state is None else state.norm, segments)
        held = None if state is None else state.cema
        before_average = None if self.cema is None else self.cema.before(xn, held, segments)
        v = self.values(xn) if self.taps is None else None
        mx, moving = xn, None
        if self.cema is not None and self.cema_norm is not None and before_average is not None:
            averaged, moving = self.cema(xn, before_average, segments)
            mx = self.cema_norm(averaged)
        first = [layer for layer in (self.to_shared, self.to_query, self.to_key) if layer is not None]
        # One call adds up the gradients of mx in the products. Other ranks wait for what the first outputs give.
        together = segments.exchange is None and norm_adds(x)
        shared: Sequence[Tensor]
        if together:
            shared, gates, terms = self.gates_and_residual(mx, x, *first)
        else:
            shared = project(mx, *first)
        convolution = None
        if v is None:
            shared, v, convolution = self.convolved(shared, xn, None if state is None else state.convolution, segments)
        projections = self.queries_and_keys(shared)
        before = self.before(projections, shared[-1], v, state, segments)
        if not together:
            _, gates, terms = self.gates_and_residual(mx, x)
        out, attention, memory = self.mix(projections, v, gates, before, segments)
        terms, _ = project_onto(terms, out, self.to_output)
        return terms, MixerState(norm, moving, attention, memory, convolution) if segments.keeps_state else None

    def values(self, xn: Tensor) -> Tensor:
        """Return v, (B, K, T, value_head_dim)."""
        return self.activated(*project(xn, self.to_value))

    def activated(self, value: Tensor) -> Tensor:
        """Return v of projected values, (B, K, T, value_head_dim)."""
        heads, linear_values = self.config.num_key_value_heads, self.config.value_activation == "none"
        return by_head(value, heads).contiguous() if linear_values else silu_by_head(value, heads)

    def convolved(
        self, shared: Sequence[Tensor], xn: Tensor, state: Tensor | None, segments: Segments
    ) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """Return projected queries and keys, and v, after the convolution, and its state."""
        assert self.taps is not None, "there must be a convolution"
        parts = *shared, *project(xn, self.to_value)
        steps, state = short_convolution(torch.cat(parts, -1), self.taps, state, segments=segments)
        *queries_and_keys, value = steps.split([part.shape[-1] for part in parts], -1)
        return queries_and_keys, self.activated(value), state

    def queries_and_keys(self, shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return q, k (and qm, km), (B, H or K, T, key_head_dim) each, of z, or of projected queries and keys.

        With n = z / RMS(z) per head, they are (1 + γ_i) / √d · n + β_i.
        """
        config = self.config
        if self.scale is not None and self.offset is not None:
            whole = config.unit_vectors == "whole"
            eps = config.rms_eps or config.norm_eps
            rows = qk_scale_shift(shared[0], self.scale, self.offset, 1 if whole else config.num_heads, eps)
            return tuple(by_head(row.squeeze(1), config.num_heads) for row in rows) if whole else rows
        query, key = shared
        q = by_head(query if self.query_norm is None else self.query_norm(query), config.num_heads)
        heads = q / math.sqrt(config.key_head_dim), self.key(key)
        if config.memory == "none":
            return heads
        return (*heads, by_head(query, config.num_heads), by_head(key, config.num_key_value_heads))

    def key(self, projected: Tensor) -> Tensor:
        """Return separate keys, (B, K, T, key_head_dim)."""
        normal = projected if self.key_norm is None else self.key_norm(projected)
        return by_head(normal, self.config.num_key_value_heads)

    def gates_and_residual(self, mx: Tensor, x: Tensor, *first: nn.Linear) -> tuple[tuple[Tensor, ...], Gates, Terms]:
        """Return the outputs of the layers ``first``, the gates before their activations, and the terms of x plus the
        hidden branch."""
        gates = self.to_gate, self.to_memory_gate
        layers = [*first, *(layer for layer in gates if layer is not None)]
        terms: Terms = (x,)
        if self.to_hidden is None:
            found = project(mx, *layers) if layers else ()
        else:
            terms, found = project_onto((x,), mx, *layers, self.to_hidden)
        each = iter(found[len(first) :])
        return found[: len(first)], tuple(None if layer is None else next(each) for layer in gates), terms

    def before(
        self, projections: tuple[Tensor, ...], z: Tensor, v: Tensor, state: MixerState | None, segments: Segments
    ) -> Pending[Heads]:
        """Return the states before the first token of attention, and of the memory without its matrix.

        ``state`` is that before the call; on ranks after the first it is None. A rank sends its last chunk to the next
        rank, as z (or the projected keys) and v, and the memory's weights and the sinks to all later ones. The receiver
        computes the keys of attention and memory from z, and the summary of the chunk: that is fewer bytes than to send
        them.
        """
        held, memory = (None, None) if state is None else (state.attention, state.memory)
        exchange, rule, chunk, pattern = segments.exchange, self.config.memory, self.config.chunk_size, self.pattern
        # The state holds two chunks: without lookback attention needs the chunk only if a rank has a single one.
        unneeded = pattern.lookback == 0 and pattern.sinks == 0 and segments.length > chunk
        if exchange is None or (rule == "none" and unneeded):
            return lambda: (held, memory)
        last, weights, sinks = [z[:, -chunk:], v[:, :, -chunk:]], [], []
        if pattern.sinks:
            after = sinks_after(pattern, segments, projections[1], v, None if held is None else held.sinks)
            sinks = [after.keys, after.values]
        count = len(sinks)  # what is received must not keep what is sent alive
        if rule != "none":
            k = projections[3]
            batch, heads, _, key_dim = k.shape
            given = batch, heads, key_dim, v.shape[-1], compute_dtype(k), v.device
            memory = memory or WorkingMemoryState.empty(rule, *given)
            weights = [chunk_weights(rule, chunk, k, memory, segments)]
        arriving = exchange.send(last, [*sinks, *weights])

        def receive() -> Heads:
            before_z, values, *earlier = arriving()
            of_sinks, earlier = earlier[:count], earlier[count:]
            if self.to_key is None:
                _, key, *of_memory = self.queries_and_keys((before_z,))
            else:
                key, of_memory = self.key(before_z), [by_head(before_z, self.config.num_key_value_heads)]
            attention = state_before(held, [key, values, *of_sinks], pattern, segments, exchange)
            if rule == "none" or memory is None:
                return attention, None
            given = memory, earlier[0], of_memory[-1], values
            return attention, memory_state_before(rule, chunk, *given, segments, exchange)

        return receive

    def mix(
        self, projections: tuple[Tensor, ...], v: Tensor, gates: Gates, before: Pending[Heads], segments: Segments
    ) -> tuple[Tensor, AttentionState, WorkingMemoryState | None]:
        """Return gated attention plus memory, (B, T, value_dim), and their states after the last token."""
        (q, k, *of_memory), (held, memory) = projections, before()
        recalled = self.recall(of_memory, v, memory, segments)
        attended, attention = chunk_attention(q, k, v, self.pattern, state=held, segments=segments)
        reads = [wait() for wait in recalled]
        read = None
        if reads:  # query head i · shared + j is head i of read j
            read = reads[0][0] if len(reads) == 1 else torch.stack([found for found, _ in reads], 2).flatten(1, 2)
        return self.gated(attended, read, gates, segments), attention, reads[0][1] if reads else None

    def recall(
        self, queries_and_keys: list[Tensor], v: Tensor, state: WorkingMemoryState | None, segments: Segments
    ) -> list[Pending[tuple[Tensor, WorkingMemoryState]]]:
        """Start to read the memory, once for each head of queries that shares a head of keys; none without memory."""
        if self.config.memory == "none":
            return []
        (q, k), chunk, shared = queries_and_keys, self.config.chunk_size, self.config.num_heads // v.shape[1]
        start = partial(start_working_memory, chunk_size=chunk, rule=self.config.memory, state=state, segments=segments)
        return [start(q if shared == 1 else q[:, i::shared].contiguous(), k, v) for i in range(shared)]

    def gated(self, attended: Tensor, read: Tensor | None, gates: Gates, segments: Segments) -> Tensor:
        """Return attention and memory, (B, H, T, value_head_dim) each, joined and gated, (B, T, value_dim)."""
        config, (gate, memory_gate) = self.config, gates
        if read is not None and self.memory_factor is not None:
            read = read * self.memory_factor.view(-1, 1, 1).to(read.dtype)
        if read is not None and memory_gate is not None:
            share = by_head(memory_gate.sigmoid(), config.num_heads)
            share = share * segments.shared(("readable", config.chunk_size), partial(_readable, config.chunk_size))
            share = share.repeat_interleave(config.value_head_dim // config.memory_gate_channels, -1).to(read.dtype)
            attended, read = attended + share * (read - attended), None
        elif read is not None and config.gate != "attention":
            attended, read = attended + read, None
        if config.output_norm:
            eps = config.rms_eps or config.norm_eps
            attended = group_rms_norm(attended if read is None else attended + read, None, 1, eps)
            read = None
        if gate is not None and config.gate_activation == "silu":
            return gated(attended, gate, read)
        if gate is not None:  # log₂(1 + 2^x)
            attended = attended * F.softplus(by_head(gate, config.num_heads), beta=math.log(2))
        return (attended if read is None else attended + read).transpose(1, 2).flatten(2)


def _readable(chunk: int, segments: Segments) -> Tensor:
    """Return whether the memory holds tokens of the document of each token, (B, 1, T, 1)."""
    position = segments.clock.position[:, None] + torch.arange(segments.length, device="cpu")
    holds = segments.document_starts < (position // chunk - 1) * chunk
    return to_device(holds, segments.device)[:, None, :, None]


def project_onto(terms: Terms, x: Tensor, *layers: nn.Linear) -> tuple[Terms, tuple[Tensor, ...]]:
    """Return ``terms`` with the last layer's output for x, and the outputs of the other layers."""
    if norm_adds(terms[0]):
        *others, last = project(x, *layers)
        return (*terms, last), tuple(others)
    (onto,) = terms
    *others, last = project(x, *layers, onto=onto)
    return (last,), tuple(others)
