"""Mixer layer: attention gated by a moving average, with a working memory (paper Eq. 5–8, 16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.cema import CEMA
from gecko.layers.linear import linear, project
from gecko.layers.norms import RMSNorm, TimestepNorm
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, state_before
from gecko.ops.common import compute_dtype
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState
from gecko.ops.working_memory.context import chunk_weights, memory_state_before, start_working_memory
from gecko.runtime.records import TensorRecord
from gecko.segments import Arriving, Pending, Ready, Segments


@dataclass(frozen=True)
class MixerState(TensorRecord):
    """State of one mixer. ``memory`` is None in architectures without a working memory."""

    norm: TimestepNormState
    cema: Tensor
    attention: AttentionState
    memory: WorkingMemoryState | None


class Heads(NamedTuple):
    """States of the operators on heads, before the first token of a call."""

    attention: AttentionState | None
    memory: WorkingMemoryState | None


class GatedAttention(nn.Module):
    """x + (W_h1 mx + b) + W_h2 (attention(q, k, v) · r + memory(qm, km, v)).

    xn = TimestepNorm(x), mx = RMSNorm(CEMA(xn)), v = silu(W_v xn + b), r = silu(W_r mx + b). q, k, qm and km are scaled
    and shifted copies of one normalised vector per head, W_z mx + b.
    """

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__()
        self.config = config
        model_dim, key_dim, value_dim = config.model_dim, config.key_dim, config.value_dim
        self.pattern = Pattern(config.chunk_size, config.attention, config.rope_base, config.num_rope_heads)
        self.norm = TimestepNorm(config)
        self.cema = CEMA(model_dim, config.cema_modes, config.cema_skip)
        self.cema_norm = RMSNorm(config)
        self.to_shared = linear(model_dim, key_dim, bias=True)
        self.to_value = linear(model_dim, value_dim, bias=True)
        self.to_gate = linear(model_dim, value_dim, bias=True)
        self.to_hidden = linear(model_dim, model_dim, bias=True)
        self.to_output = linear(value_dim, model_dim, bias=False)
        rows = 2 if config.memory == "none" else 4
        self.scale = nn.Parameter(torch.zeros(rows, key_dim))
        nn.init.constant_(self.scale[2:], config.memory_key_length - 1)
        self.offset = nn.Parameter(torch.zeros(rows, key_dim))

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState]:
        """Return y of the shape of x, (B, T, D), and the state after the last token.

        States that come from other ranks are sent as early and waited for as late as possible, so their exchange
        overlaps with the values, with gate and hidden projection, and with attention.
        """
        xn, norm = self.norm(x, None if state is None else state.norm, segments)
        moving_before = self.cema.before(xn, None if state is None else state.cema, segments)
        v = self.values(xn)
        averaged, moving = self.cema(xn, moving_before, segments)
        mx = self.cema_norm(averaged)
        (z,) = project(mx, self.to_shared)
        projections = self.queries_and_keys(z)
        before = self.before(projections, z, v, state, segments)
        gate, y = project(mx, self.to_gate, self.to_hidden, onto=x)
        out, attention, memory = self.mix(projections, v, gate, before, segments)
        (y,) = project(out, self.to_output, onto=y)
        return y, MixerState(norm, moving, attention, memory)

    def values(self, xn: Tensor) -> Tensor:
        """Return v, (B, H, T, value_head_dim)."""
        (value,) = project(xn, self.to_value)
        return silu_by_head(value, self.config.num_heads)

    def queries_and_keys(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return q, k (and qm, km), (B, H, T, key_head_dim) each: (1 + γ_i) / √d · n + β_i, n = z / RMS(z) per head."""
        config = self.config
        return qk_scale_shift(z, self.scale, self.offset, config.num_heads, config.norm_eps)

    def before(
        self, projections: tuple[Tensor, ...], z: Tensor, v: Tensor, state: MixerState | None, segments: Segments
    ) -> Pending[Heads]:
        """Return the states before the first token of attention, and of the memory without its matrix.

        ``state`` is that before the call; on ranks after the first it is None. A rank sends its last chunk to the next
        rank, as z and v, and the memory's weights to all later ones. The receiver computes the keys of attention and
        memory from z, and the summary of the chunk: that is fewer bytes than to send them.
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
            keys = self.queries_and_keys(before_z)
            attention = state_before(own.attention, keys[1], values, self.pattern, segments, exchange.first)
            if rule == "none" or memory is None:
                return Heads(attention, None)
            given = memory, earlier[0], keys[3], values
            return Heads(attention, memory_state_before(rule, chunk, *given, segments, exchange))

        return Arriving(exchange.send(to_next=last, to_later=weights), receive)

    def mix(
        self, projections: tuple[Tensor, ...], v: Tensor, gate: Tensor, before: Pending[Heads], segments: Segments
    ) -> tuple[Tensor, AttentionState, WorkingMemoryState | None]:
        """Return gated attention plus memory, (B, T, value_dim), and their states after the last token."""
        states, rule = before.wait(), self.config.memory
        recalled: Pending[tuple[Tensor | None, WorkingMemoryState | None]] = Ready((None, None))
        if rule != "none":
            given = projections[2], projections[3], v, self.config.chunk_size
            recalled = start_working_memory(*given, rule, states.memory, segments)
        attended, attention = self.attend(projections, v, states.attention, segments)
        read, memory = recalled.wait()
        return gated(attended, gate, read), attention, memory

    def attend(
        self, projections: tuple[Tensor, ...], v: Tensor, state: AttentionState | None, segments: Segments
    ) -> tuple[Tensor, AttentionState]:
        """Return attention of the first two ``projections``, (B, H, T, value_head_dim), and its state."""
        config = self.config
        return chunk_attention(
            projections[0], projections[1], v, config.chunk_size, attention=config.attention,
            rope_base=config.rope_base, rope_heads=config.rope_heads, state=state, segments=segments,
        )  # fmt: skip
