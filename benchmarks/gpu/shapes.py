"""The shapes that operators are measured at, and what each must move and multiply at least."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.config import GeckoConfig

SCAN_CHUNK = 64
"""Steps in one product of the moving average's matrix form, as FLOPs are counted."""


@dataclass(frozen=True)
class Floor:
    """Counted by hand: each input read once and each output written once, and the products of the equations.

    ``both`` is forward and backward together. Products of backward are twice those of forward; what a kernel computes
    again is its own cost.
    """

    numbers_forward: float
    numbers_both: float
    flops_forward: float = 0.0

    @property
    def flops_both(self) -> float:
        return 3 * self.flops_forward


@dataclass(frozen=True)
class Shape:
    """One row of ``length`` tokens in a model of ``config``."""

    name: str
    config: GeckoConfig
    length: int

    @property
    def visible_pairs(self) -> float:
        """Pairs of a query and a key in its window, in one head."""
        chunk, chunks = self.config.chunk_size, self.length / self.config.chunk_size
        return chunks * chunk * (chunk + 1) / 2 + max(0.0, chunks - 1) * chunk**2

    def moving_average(self) -> Floor:
        size = self.length * self.config.model_dim
        return Floor(2 * size, 5 * size, 2 * size * (SCAN_CHUNK + 4 * self.config.cema_modes))

    def norm(self) -> Floor:
        size = self.length * self.config.model_dim
        return Floor(2 * size, 5 * size)

    def fan_out(self) -> Floor:
        size = self.length * self.config.key_dim
        return Floor(5 * size, 11 * size)

    def gated(self) -> Floor:
        size = self.length * self.config.value_dim
        return Floor(4 * size, 11 * size)

    def swiglu(self) -> Floor:
        size = self.length * self.config.ffn_dim
        return Floor(3 * size, 8 * size)

    def attention(self) -> Floor:
        keys, values = self.config.key_dim, self.config.value_dim
        size = self.length * (2 * keys + 2 * values)
        return Floor(size, 2.5 * size, 2 * self.visible_pairs * (keys + values))

    def memory(self) -> Floor:
        """Read, corrected and written once a token."""
        keys, values = self.config.key_dim, self.config.value_dim
        size = self.length * (2 * keys + 2 * values)
        return Floor(size, 2.5 * size, 2 * 3 * self.length * keys * self.config.value_head_dim)

    def attention_and_memory(self) -> Floor:
        a, b = self.attention(), self.memory()
        further = 2 * self.length * self.config.key_dim
        return Floor(a.numbers_forward + further, a.numbers_both + 2.5 * further, a.flops_forward + b.flops_forward)

    def loss(self) -> Floor:
        width, words = self.config.model_dim, self.config.vocab_size
        return Floor(self.length * width, 3 * self.length * width, 2 * self.length * width * words)

    def whole_attention(self) -> Floor:
        """Attention of every token to all before it, in heads as wide as the model together."""
        size = self.length * self.config.model_dim
        return Floor(4 * size, 11 * size, 2 * self.length**2 * self.config.model_dim)
