"""Mixer layer: attention gated by a moving average, with a working memory (paper Eq. 5–8, 16)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.cema import CEMA
from gecko.layers.linear import linear, project
from gecko.layers.norms import RMSNorm, block_norm
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, state_before
from gecko.ops.common import compute_dtype
from gecko.ops.gates import by_head, gated, silu_by_head
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState
from gecko.ops.working_memory.context import chunk_weights, memory_state_before, start_working_memory
from gecko.runtime.records import TensorRecord
from gecko.segments import Arriving, Pending, Ready, Segments


@dataclass(frozen=True)
class MixerState(TensorRecord):
    """State of one mixer. What an architecture does not have is None."""

    norm: TimestepNormState | None
    cema: Tensor | None
    attention: AttentionState
    memory: WorkingMemoryState | None


class Heads(NamedTuple):
    """States of the operators on heads, before the first token of a call."""

    attention: AttentionState | None
    memory: WorkingMemoryState | None


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
        averages, separate = config.local_mixing == "cema", config.queries_and_keys == "separate"
        own_keys, own_values = (config.num_key_value_heads * x for x in (config.key_head_dim, config.value_head_dim))
        self.norm = block_norm(config)
        self.cema = CEMA(model_dim, config.cema_modes, config.cema_skip) if averages else None
        self.cema_norm = RMSNorm(config) if averages else None
        self.to_shared = None if separate else linear(model_dim, key_dim, bias=True)
        self.to_query = linear(model_dim, key_dim, bias=True) if separate else None
        self.to_key = linear(model_dim, own_keys, bias=True) if separate else None
        self.to_value = linear(model_dim, own_values, bias=True)
        self.to_gate = None if config.gate == "none" else linear(model_dim, value_dim, bias=True)
        self.to_hidden = linear(model_dim, model_dim, bias=True) if config.hidden_branch else None
        self.to_output = linear(value_dim, model_dim, bias=False)
        normalised = config.query_key_norm
        self.query_norm = RMSNorm(config, key_dim, config.num_heads) if normalised else None
        self.key_norm = RMSNorm(config, own_keys, config.num_key_value_heads) if normalised else None
        rows = 2 if config.memory == "none" else 4
        self.scale = None if separate else nn.Parameter(torch.zeros(rows, key_dim))
        if self.scale is not None:
            nn.init.constant_(self.scale[2:], config.memory_key_length - 1)
        self.offset = None if separate else nn.Parameter(torch.zeros(rows, key_dim))

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState]:
        """Return y of the shape of x, (B, T, D), and the state after the last token.

        States that come from other ranks are sent as early and waited for as late as possible, so their exchange
        overlaps with the values, with gate and hidden projection, and with attention.
        """
        xn, norm = self.norm(x, None if state is None else state.norm, segments)
        before_average = (
            None if self.cema is None else self.cema.before(xn, None if state is None else state.cema, segments)
        )
        v = self.values(xn)
        mx, moving = xn, None
        if self.cema is not None and self.cema_norm is not None and before_average is not None:
            averaged, moving = self.cema(xn, before_average, segments)
            mx = self.cema_norm(averaged)
        shared = project(mx, *(layer for layer in (self.to_shared, self.to_query, self.to_key) if layer is not None))
        projections = self.queries_and_keys(shared)
        before = self.before(projections, shared[-1], v, state, segments)
        gate, y = self.gate_and_residual(mx, x)
        out, attention, memory = self.mix(projections, v, gate, before, segments)
        (y,) = project(out, self.to_output, onto=y)
        return y, MixerState(norm, moving, attention, memory)

    def values(self, xn: Tensor) -> Tensor:
        """Return v, (B, K, T, value_head_dim)."""
        (value,) = project(xn, self.to_value)
        heads, linear_values = self.config.num_key_value_heads, self.config.value_activation == "none"
        return by_head(value, heads).contiguous() if linear_values else silu_by_head(value, heads)

    def queries_and_keys(self, shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return q, k (and qm, km), (B, H or K, T, key_head_dim) each, of z, or of projected queries and keys.

        With n = z / RMS(z) per head, they are (1 + γ_i) / √d · n + β_i.
        """
        config = self.config
        if self.scale is not None and self.offset is not None:
            return qk_scale_shift(shared[0], self.scale, self.offset, config.num_heads, config.norm_eps)
        query, key = shared
        q = by_head(query if self.query_norm is None else self.query_norm(query), config.num_heads)
        heads = q / math.sqrt(config.key_head_dim), self.key(key)
        if config.memory == "none":
            return heads
        return (*heads, *(by_head(x, config.num_heads) for x in shared))

    def key(self, projected: Tensor) -> Tensor:
        """Return separate keys, (B, K, T, key_head_dim)."""
        normal = projected if self.key_norm is None else self.key_norm(projected)
        return by_head(normal, self.config.num_key_value_heads)

    def gate_and_residual(self, mx: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gate before its activation, and x plus the hidden branch."""
        layers = [layer for layer in (self.to_gate, self.to_hidden) if layer is not None]
        found = project(mx, *layers, onto=None if self.to_hidden is None else x) if layers else ()
        return None if self.to_gate is None else found[0], x if self.to_hidden is None else found[-1]

    def before(
        self, projections: tuple[Tensor, ...], z: Tensor, v: Tensor, state: MixerState | None, segments: Segments
    ) -> Pending[Heads]:
        """Return the states before the first token of attention, and of the memory without its matrix.

        ``state`` is that before the call; on ranks after the first it is None. A rank sends its last chunk to the next
        rank, as z (or the projected keys) and v, and the memory's weights to all later ones. The receiver computes the
        keys of attention and memory from z, and the summary of the chunk: that is fewer bytes than to send them.
        """
        own = Heads(None, None) if state is None else Heads(state.attention, state.memory)
        exchange, rule, chunk = segments.exchange, self.config.memory, self.config.chunk_size
        # The state holds two chunks: without lookback attention needs the chunk only if a rank has a single one.
        if exchange is None or (rule == "none" and self.pattern.lookback == 0 and segments.length > chunk):
            return Ready(own)
        last, weights, memory = [z[:, -chunk:], v[:, :, -chunk:]], [], own.memory
        if rule != "none":
            k = projections[3]
            batch, heads, _, key_dim = k.shape
            memory = memory or WorkingMemoryState.empty(
                rule, batch, heads, key_dim, v.shape[-1], compute_dtype(k), v.device
            )
            weights = [chunk_weights(rule, chunk, k, memory, segments)]

        def receive(arrived: list[Tensor]) -> Heads:
            before_z, values, *earlier = arrived
            if self.to_key is None:
                _, key, *of_memory = self.queries_and_keys((before_z,))
            else:
                key, of_memory = self.key(before_z), [by_head(before_z, self.config.num_heads)]
            attention = state_before(own.attention, key, values, self.pattern, segments, exchange.first)
            if rule == "none" or memory is None:
                return Heads(attention, None)
            given = memory, earlier[0], of_memory[-1], values
            return Heads(attention, memory_state_before(rule, chunk, *given, segments, exchange))

        return Arriving(exchange.send(to_next=last, to_later=weights), receive)

    def mix(
        self, projections: tuple[Tensor, ...], v: Tensor, gate: Tensor | None, before: Pending[Heads],
        segments: Segments,
    ) -> tuple[Tensor, AttentionState, WorkingMemoryState | None]:  # fmt: skip
        """Return gated attention plus memory, (B, T, value_dim), and their states after the last token."""
        states, rule = before.wait(), self.config.memory
        recalled: Pending[tuple[Tensor | None, WorkingMemoryState | None]] = Ready((None, None))
        if rule != "none":
            given = projections[2], projections[3], v, self.config.chunk_size
            recalled = start_working_memory(*given, rule, states.memory, segments)
        attended, attention = self.attend(projections, v, states.attention, segments)
        read, memory = recalled.wait()
        if read is not None and self.config.gate != "attention":
            attended, read = attended + read, None
        out = attended.transpose(1, 2).flatten(2) if gate is None else gated(attended, gate, read)
        return out, attention, memory

    def attend(
        self, projections: tuple[Tensor, ...], v: Tensor, state: AttentionState | None, segments: Segments
    ) -> tuple[Tensor, AttentionState]:
        """Return attention of the first two ``projections``, (B, H, T, value_head_dim), and its state."""
        return chunk_attention(projections[0], projections[1], v, self.pattern, state=state, segments=segments)
