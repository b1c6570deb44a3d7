"""Shapes at which operators are measured, and the minimum of bytes and FLOPs of each operator."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.config import GeckoConfig

SCAN_CHUNK = 64
"""Steps per product in CEMA's matrix form, which is the form whose FLOPs are counted."""


@dataclass(frozen=True)
class Floor:
    """Minimum work of an operator: each input read once, each output written once, and the products of the equations.

    ``both`` is forward and backward together. The products of backward are twice those of forward; recomputation in a
    kernel is not counted.
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
        """Number of pairs of a query and a key in its window, in one head."""
        chunk, chunks = self.config.chunk_size, self.length / self.config.chunk_size
        return chunks * chunk * (chunk + 1) / 2 + max(0.0, chunks - 1) * chunk**2

    def moving_average(self) -> Floor:
        size = self.length * self.config.model_dim
        return Floor(2 * size, 5 * size, 2 * size * (SCAN_CHUNK + 4 * self.config.cema_modes))

    def norm(self) -> Floor:
        size = self.length * self.config.model_dim
        return Floor(2 * size, 5 * size)

    def qk_scale_shift(self) -> Floor:
        size = self.length * self.config.key_dim
        return Floor(5 * size, 11 * size)

    def gated(self) -> Floor:
        size = self.length * self.config.value_dim
        return Floor(4 * size, 10 * size)

    def swiglu(self) -> Floor:
        size = self.length * self.config.ffn_dim
        return Floor(3 * size, 8 * size)

    def attention(self) -> Floor:
        return self._mixing(2, 2 * self.visible_pairs * (self.config.key_dim + self.config.value_dim))

    def memory(self) -> Floor:
        """Read, correct and write the memory once per token."""
        return self._mixing(2, 2 * 3 * self.length * self.config.key_dim * self.config.value_head_dim)

    def attention_and_memory(self) -> Floor:
        return self._mixing(4, self.attention().flops_forward + self.memory().flops_forward)

    def _mixing(self, rows: int, flops: float) -> Floor:
        """Return the floor for ``rows`` queries and keys and one value per token; backward reads them again."""
        keys, values = rows * self.length * self.config.key_dim, self.length * self.config.value_dim
        return Floor(keys + 2 * values, 3 * keys + 5 * values, flops)

    def loss(self) -> Floor:
        width, words = self.config.model_dim, self.config.vocab_size
        size = (self.length + words) * width
        return Floor(size, 3 * size, 2 * self.length * width * words)

    def whole_attention(self) -> Floor:
        """Return the floor of attention to all earlier tokens, with heads that are together as wide as the model."""
        size = self.length * self.config.model_dim
        return Floor(4 * size, 11 * size, 2 * self.length**2 * self.config.model_dim)
