"""FLOPs, state and exchanged bytes of a Gecko and of a Llama, counted on the code.

``counts_of(config)`` returns ``GeckoCounts``, also for relatives such as Megalodon, or ``LlamaCounts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gecko.config import GeckoConfig
from gecko.inference import piece_length
from gecko.inference.generate import LLAMA_PIECE
from gecko.models import LlamaConfig, ModelConfig
from gecko.ops.scan import SCAN_CHUNK
from gecko.state import GeckoState
from gecko.train.throughput import linear_products

FLOAT, HALF = 4, 2
"""Bytes of a float32 (states, gradients, optimizer moments) and of a bfloat16."""


class Flops(NamedTuple):
    """Floating-point operations; a multiply-add counts as two."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def twice_backward(forward: float) -> Flops:
    """Return the FLOPs of an operation whose backward pass takes twice its forward pass."""
    return Flops(forward, 2 * forward)


STATE_PARTS = ("clock", "timestep norms", "CEMA", "attention window", "working memory")


@dataclass(frozen=True)
class GeckoCounts:
    """Numbers of a Gecko."""

    config: GeckoConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """Return the FLOPs per token of the matrix products in the code, by part, for rows of ``length`` tokens.

        Element-wise operations are left out.

        For a layer, with D, Z, V, F the model, key, value and feed-forward widths, z = Z / heads, v = V / heads, G norm
        groups, N modes, c the attention chunk, w the attention window and C = 64 the scan chunk:

            part        forward                             backward
            linear      2 (Z D + 2 V D + D² + V D + 3 F D)  twice (2 F D without the gate of SwiGLU)
            attention   2 w (Z + V)                         2 w (3 Z + 2 V): scores are recomputed
            memory      2 Z (z + 2 v + z v / c)             twice
            CEMA        D (2 C + 8 N)                       twice
            norms       4 G (C + 1)                         4 G (C + 1 + D)
            head        2 D · vocabulary                    twice (once for the model)

        Attention computes whole windows and masks half of one chunk, so it computes more than it needs. MFU counts
        the FLOPs that are needed (``gecko.train.throughput``).
        """
        config = self.config
        layers, model_dim = config.num_layers, config.model_dim
        norms = layers + 1 if config.norm == "timestep" else 0
        averages = layers * model_dim if config.local_mixing == "cema" else 0
        norm, window = 4.0 * config.timestep_groups * (SCAN_CHUNK + 1), self._windows * config.chunk_size
        key_dim, value_dim = config.key_dim, config.value_dim
        linear, head = (twice_backward(2.0 * products) for products in linear_products(config))
        return {
            "linear": linear,
            "attention": Flops(
                layers * 2.0 * window * (key_dim + value_dim), layers * 2.0 * window * (3 * key_dim + 2 * value_dim)
            ),
            "memory": twice_backward(layers * self._memory()),
            "CEMA": twice_backward(averages * (2.0 * SCAN_CHUNK + 8 * config.cema_modes)),
            "norms": Flops(norms * norm, norms * (norm + 4 * config.timestep_groups * model_dim)),
            "head": head,
        }

    def keys(self, length: int) -> str:
        """Describe the number of keys that attention computes per token of such a row."""
        return f"whole windows of {self._windows * self.config.chunk_size:,} keys"

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """Return the bytes of the state by part, for weights of ``itemsize`` bytes. They do not depend on ``length``.

        The state is float32, except the values in the attention window.
        """
        sizes = dict.fromkeys(STATE_PARTS, 0)
        value_dtype = torch.bfloat16 if itemsize < FLOAT else torch.float32
        empty = GeckoState.empty(self.config, value_dtype=value_dtype, device="meta")
        for name, tensor in empty.tensors().items():
            sizes[state_part(name)] += tensor.nbytes
        return sizes

    def piece(self) -> int:
        """Return the number of tokens per piece in which a prompt is read."""
        return piece_length(self.config)

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """Return the bytes that the busiest of ``ranks`` context ranks sends in a layer's forward pass, per row.

        The backward pass sends the same number. To the next rank it sends the last attention chunk's z, from which that
        computes the keys, and its values. To every later rank it sends the states of CEMA and of the norm, the sinks,
        the memory's affine map A, B, and two weights. ``benchmarks/context_exchange.py`` measures them.
        """
        config = self.config
        remembers = config.memory != "none"
        heads, key, value = config.num_key_value_heads, config.key_head_dim, config.value_head_dim
        window = config.chunk_size * itemsize * heads * (key + value)
        averages, norm = config.local_mixing == "cema", config.norm == "timestep"
        later = FLOAT * 2 * (config.model_dim * config.cema_modes * averages + config.timestep_groups * norm)
        later += config.sinks * heads * (FLOAT * key + itemsize * value)
        if remembers:
            later += config.key_dim * (FLOAT * (key + 2) + itemsize * value)
        return (window if remembers or config.sinks or self._windows > 1 else 0) + (ranks - 1) * later

    @property
    def _windows(self) -> int:
        """Number of key chunks that each query chunk is multiplied with."""
        return 1 if self.config.attention == "chunk" else 2

    def _memory(self) -> float:
        config = self.config
        if config.memory == "none":
            return 0.0
        key, value = config.key_head_dim, config.value_head_dim
        products = key + 2 * value + key * value / config.chunk_size
        if config.memory == "orthogonal":  # answers for keys, and the memory before them
            products = 3 * value + 2 * key * value / config.chunk_size
        if config.memory == "linear":
            products += 2  # the normaliser of keys and of queries
        return 2.0 * config.key_dim * products


def state_part(name: str) -> str:
    """Return the one of ``STATE_PARTS`` to which a tensor of a reading state belongs."""
    parts = name.split(".")
    if parts[0] == "clock":
        return "clock"
    if "attention" in parts:
        return "attention window"
    if "memory" in parts:
        return "working memory"
    return "CEMA" if "cema" in parts else "timestep norms"


@dataclass(frozen=True)
class LlamaCounts:
    """The same numbers of a Llama."""

    config: LlamaConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """Return the FLOPs per token of matrix products.

        For a layer, with D, K, F the widths of the model, of all keys and of the feed-forward network, and T the tokens
        of a row, which is one document:

            part        forward                    backward
            linear      2 (2 D² + 2 K D + 3 F D)   twice
            attention   2 T D                      5 T D: scores are recomputed
            head        2 D · vocabulary           twice (once for the model)

        Attention is assumed to be a kernel that skips the keys after each query, which are half of all keys.
        """
        attention = 1.0 * self.config.num_layers * length * self.config.model_dim
        linear, head = (twice_backward(2.0 * products) for products in linear_products(self.config))
        return {"linear": linear, "attention": Flops(2 * attention, 5 * attention), "head": head}

    def keys(self, length: int) -> str:
        return f"{length // 2:,} keys on average"

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """Return the bytes of keys and values after one row of ``length`` tokens."""
        config = self.config
        one = config.num_layers * config.num_key_value_heads * config.head_dim * length * itemsize
        return {"keys": one, "values": one}

    def piece(self) -> int:
        return LLAMA_PIECE

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """Return 0: context ranks are not supported."""
        return 0


def counts_of(config: ModelConfig) -> GeckoCounts | LlamaCounts:
    return LlamaCounts(config) if isinstance(config, LlamaConfig) else GeckoCounts(config)
