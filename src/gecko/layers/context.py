"""Mixer of a rank of a context group: the same operators as on one device, from the states that other ranks send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gecko.layers.linear import project
from gecko.ops.chunk_attention import AttentionState, state_before
from gecko.ops.common import compute_dtype
from gecko.ops.gates import gated
from gecko.ops.timestep_norm import TimestepNormState
from gecko.ops.working_memory import WorkingMemoryState
from gecko.ops.working_memory.context import MemoryContext
from gecko.segments import ContextExchange, PendingTensors, Segments

if TYPE_CHECKING:
    from gecko.layers.gated_attention import GatedAttention, MixerState


def mix_on_rank(
    mixer: GatedAttention, x: Tensor, state: MixerState | None, segments: Segments
) -> tuple[Tensor, TimestepNormState, Tensor, AttentionState, WorkingMemoryState | None]:
    """Compute ``mixer(x, state, segments)``; return y and the parts of its state.

    There are four exchanges: of the norm's statistics, of CEMA's state, of the last chunk and the memory's weights, and
    of the memory's map. Each starts as early and is waited for as late as possible, so it overlaps with the values,
    with gate and hidden projection, and with attention.
    """
    exchange = segments.exchange
    assert exchange is not None, "the call must be one of a context group"
    xn, norm = mixer.norm(x, None if state is None else state.norm, segments)
    arriving = mixer.cema.start_exchange(xn, None if state is None else state.cema, segments, exchange)
    v = mixer.values(xn)
    averaged, moving = mixer.cema(xn, arriving.wait(), segments)
    mx = mixer.cema_norm(averaged)
    (z,) = project(mx, mixer.to_shared)
    projections = mixer.queries_and_keys(z)
    border = _Border.send(mixer, projections, z, v, state, segments, exchange)
    gate, y = project(mx, mixer.to_gate, mixer.to_hidden, onto=x)
    before, memory_before = border.wait()
    pending = None
    if border.memory is not None and memory_before is not None:
        pending = border.memory.enter(projections[2], projections[3], v, memory_before)
    attended, attention = mixer.attend(projections, v, before, segments)
    recalled, memory = (None, None) if pending is None else pending.wait()
    (y,) = project(gated(attended, gate, recalled), mixer.to_output, onto=y)
    return y, norm, moving, attention, memory


@dataclass(frozen=True)
class _Border:
    """Last chunk of the previous rank, from which attention and memory of this rank go on.

    The chunk is sent as z and v. The receiver computes the keys of attention and memory from z, and the summary of the
    chunk: that is fewer bytes than to send them.
    """

    mixer: GatedAttention
    arriving: PendingTensors | None
    attention: AttentionState | None
    memory: MemoryContext | None
    memory_state: WorkingMemoryState | None
    segments: Segments
    exchange: ContextExchange

    @classmethod
    def send(
        cls, mixer: GatedAttention, projections: tuple[Tensor, ...], z: Tensor, v: Tensor, state: MixerState | None,
        segments: Segments, exchange: ContextExchange,
    ) -> _Border:  # fmt: skip
        """Send this rank's last chunk to the next rank, and the memory's weights to all later ones."""
        rule, chunk = mixer.config.memory, mixer.config.chunk_size
        attention = None if state is None else state.attention
        last = [z[:, -chunk:], v[:, :, -chunk:]]
        if rule == "none":
            # The state holds two chunks: without lookback it needs the chunk only if a rank has a single one.
            needed = mixer.pattern.lookback > 0 or segments.length == chunk
            arriving = exchange.send(to_next=last) if needed else None
            return cls(mixer, arriving, attention, None, None, segments, exchange)
        memory = MemoryContext(rule, chunk, segments, exchange)
        before = None if state is None else state.memory
        if before is None:
            batch, heads, _, key_dim = projections[3].shape
            dtype = compute_dtype(projections[3])
            before = WorkingMemoryState.empty(rule, batch, heads, key_dim, v.shape[-1], dtype, v.device)
        arriving = exchange.send(to_next=last, to_later=[memory.weights(projections[3], before)])
        return cls(mixer, arriving, attention, memory, before, segments, exchange)

    def wait(self) -> tuple[AttentionState | None, WorkingMemoryState | None]:
        """Return the states of attention and memory before this rank's first token; the latter without its memory."""
        if self.arriving is None:
            return self.attention, self.memory_state
        z, values, *weights = self.arriving.wait()
        keys = self.mixer.queries_and_keys(z)
        given = self.mixer.pattern, self.segments, self.exchange.first
        attention = state_before(self.attention, keys[1], values, *given)
        if self.memory is None or self.memory_state is None:
            return attention, None
        return attention, self.memory.state_before(self.memory_state, weights[0], keys[3], values)
