"""Mixer layer: attention gated by a moving average, with a working memory (paper Eq. 5–8, 16)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.layers.cema import CEMA
from gecko.layers.context import mix_on_rank
from gecko.layers.linear import linear, project
from gecko.layers.norms import RMSNorm, TimestepNorm
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState, working_memory
from gecko.runtime.records import TensorRecord
from gecko.segments import Segments


@dataclass(frozen=True)
class MixerState(TensorRecord):
    """State of one mixer. ``memory`` is None in architectures without a working memory."""

    norm: TimestepNormState
    cema: Tensor
    attention: AttentionState
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
        """Return y of the shape of x, (B, T, D), and the state after the last token."""
        if segments.exchange is not None:
            return self._forward_on_rank(x, state, segments)
        xn, norm = self.norm(x, None if state is None else state.norm, segments)
        averaged, moving = self.cema(xn, None if state is None else state.cema, segments)
        mx = self.cema_norm(averaged)
        v = self.values(xn)
        z, gate, y = project(mx, self.to_shared, self.to_gate, self.to_hidden, onto=x)
        out, attention, memory = self._mix(self.queries_and_keys(z), v, gate, state, segments)
        (y,) = project(out, self.to_output, onto=y)
        return y, MixerState(norm, moving, attention, memory)

    def _forward_on_rank(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState]:
        y, norm, moving, attention, memory = mix_on_rank(self, x, state, segments)
        return y, MixerState(norm, moving, attention, memory)

    def values(self, xn: Tensor) -> Tensor:
        """Return v, (B, H, T, value_head_dim)."""
        (value,) = project(xn, self.to_value)
        return silu_by_head(value, self.config.num_heads)

    def queries_and_keys(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return q, k (and qm, km), (B, H, T, key_head_dim) each: (1 + γ_i) / √d · n + β_i, n = z / RMS(z) per head."""
        config = self.config
        return qk_scale_shift(z, self.scale, self.offset, config.num_heads, config.norm_eps)

    def _mix(
        self, projections: tuple[Tensor, ...], v: Tensor, gate: Tensor, state: MixerState | None, segments: Segments
    ) -> tuple[Tensor, AttentionState, WorkingMemoryState | None]:
        """Return gated attention plus memory, (B, T, value_dim), and their states."""
        config = self.config
        recalled = memory = None
        if config.memory != "none":
            recalled, memory = working_memory(
                projections[2], projections[3], v, config.chunk_size, rule=config.memory,
                state=None if state is None else state.memory, segments=segments,
            )  # fmt: skip
        attended, attention = self.attend(projections, v, None if state is None else state.attention, segments)
        return gated(attended, gate, recalled), attention, memory

    def attend(
        self, projections: tuple[Tensor, ...], v: Tensor, state: AttentionState | None, segments: Segments
    ) -> tuple[Tensor, AttentionState]:
        """Return attention of the first two ``projections``, (B, H, T, value_head_dim), and its state."""
        config = self.config
        return chunk_attention(
            projections[0], projections[1], v, config.chunk_size, attention=config.attention,
            rope_base=config.rope_base, rope_heads=config.rope_heads, state=state, segments=segments,
        )  # fmt: skip
