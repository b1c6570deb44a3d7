"""What a Gecko, or a relative such as Megalodon, computes, keeps and sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gecko.config import GeckoConfig
from gecko.generation import piece_length
from gecko.ops.scan_plan import SCAN_CHUNK
from gecko.plan.units import FLOAT, Flops, twice_backward
from gecko.state import GeckoState

STATE_PARTS = ("clock", "timestep norms", "CEMA", "attention window", "working memory")


@dataclass(frozen=True)
class GeckoCounts:
    config: GeckoConfig

    def flops(self, length: int) -> dict[str, Flops]:
        """In products of matrices, as the code computes them; what is done element by element is left out. For a
        layer, with D, Z, V, F the model's, key, value and feed-forward widths, z = Z / heads, v = V / heads, G norm
        groups, N modes, c the attention chunk, w the attention window and C = 64 the scan chunk:

            part        forward                             backward
            linear      2 (Z D + 2 V D + D² + V D + 3 F D)  twice (2 F D without the gate of SwiGLU)
            attention   2 w (Z + V)                         2 w (3 Z + 2 V): scores are computed again
            memory      2 Z (z + 2 v + z v / c)             twice
            CEMA        D (2 C + 8 N)                       twice
            norms       4 G (C + 1)                         4 G (C + 1 + D)
            head        2 D · vocabulary                    twice (once for the model)

        Attention computes whole windows and masks half of one chunk, so it needs less than it computes: MFU counts
        what is needed (``gecko.train.utilisation``).
        """
        config = self.config
        layers, model_dim = config.num_layers, config.model_dim
        norm, window = 4.0 * config.timestep_groups * (SCAN_CHUNK + 1), self._windows * config.chunk_size
        key_dim, value_dim = config.key_dim, config.value_dim
        return {
            "linear": twice_backward(layers * self._linear()),
            "attention": Flops(
                layers * 2.0 * window * (key_dim + value_dim), layers * 2.0 * window * (3 * key_dim + 2 * value_dim)
            ),
            "memory": twice_backward(layers * self._memory()),
            "CEMA": twice_backward(layers * model_dim * (2.0 * SCAN_CHUNK + 8 * config.cema_modes)),
            "norms": Flops((layers + 1) * norm, (layers + 1) * (norm + 4 * config.timestep_groups * model_dim)),
            "head": twice_backward(2.0 * model_dim * config.vocab_size),
        }

    def keys(self, length: int) -> str:
        return f"whole windows of {self._windows * self.config.chunk_size:,} keys"

    def activations(self, itemsize: int) -> float:
        """The residual stream, norms, averages, queries, keys and the memory are float32 always."""
        config, key_dim = self.config, self.config.key_dim
        kept = float((4 * FLOAT + 3 * itemsize) * config.model_dim + 5 * itemsize * config.value_dim)
        kept += FLOAT * ((2 + self._windows) * key_dim + 9 * config.timestep_groups)
        kept += (4 if config.swiglu else 2) * itemsize * config.ffn_dim
        kept += 2 * FLOAT * config.model_dim * config.cema_modes / SCAN_CHUNK
        return kept if config.memory == "none" else kept + self._memory_activations(itemsize)

    def _memory_activations(self, itemsize: int) -> float:
        config, adaptive = self.config, self.config.memory == "adaptive"
        # In float32 attention's queries and keys stay as long as the memory's: they are one tensor, and not copied.
        rows = (5 if adaptive else 7) + (0 if itemsize < FLOAT else 3 if adaptive else 2)
        products = (3 if adaptive else 1) * (config.key_head_dim + config.value_head_dim)
        return FLOAT * (rows * config.key_dim + config.value_dim + config.key_dim * products / config.chunk_size)

    def tables(self) -> int:
        """The moving average's tables: powers, into the state, out of it, and the Toeplitz matrices."""
        return self.config.model_dim * SCAN_CHUNK * (6 * FLOAT * self.config.cema_modes + FLOAT * SCAN_CHUNK)

    def projections(self) -> int:
        config, branches = self.config, 2 if self.config.swiglu else 1
        return config.key_dim + 2 * config.value_dim + 3 * config.model_dim + branches * config.ffn_dim

    def state(self, length: int, itemsize: int) -> dict[str, int]:
        """The same for any ``length``; float32 but for the values in attention's window."""
        sizes = dict.fromkeys(STATE_PARTS, 0)
        value_dtype = torch.bfloat16 if itemsize < FLOAT else torch.float32
        empty = GeckoState.empty(self.config, value_dtype=value_dtype, device="meta")
        for name, tensor in empty.tensors().items():
            sizes[state_part(name)] += tensor.nbytes
        return sizes

    def piece(self) -> int:
        return piece_length(self.config)

    def context_bytes(self, itemsize: int, ranks: int) -> int:
        """To the next rank: the last attention chunk's keys (float32) and values, and the memory's summary of that
        chunk. To every later one: the moving average's state, the norm's, the memory's affine map A, B and two weights.
        ``benchmarks/context_exchange.py`` counts them.
        """
        config = self.config
        window = (self._windows - 1) * config.chunk_size * (FLOAT * config.key_dim + itemsize * config.value_dim)
        later = FLOAT * (2 * config.model_dim * config.cema_modes + 2 * config.timestep_groups)
        affine = 0
        if config.memory != "none":
            affine = FLOAT * config.key_dim * (config.key_head_dim + config.value_head_dim)
            later += affine + 2 * FLOAT * config.key_dim
        return window + affine + (ranks - 1) * later

    @property
    def _windows(self) -> int:
        """Chunks of keys that a chunk of queries is multiplied with."""
        return 1 if self.config.attention == "chunk" else 2

    def _linear(self) -> float:
        config = self.config
        maps = config.key_dim + 3 * config.value_dim + config.model_dim + (3 if config.swiglu else 2) * config.ffn_dim
        return 2.0 * config.model_dim * maps

    def _memory(self) -> float:
        config = self.config
        if config.memory == "none":
            return 0.0
        key, value = config.key_head_dim, config.value_head_dim
        products = key + 2 * value + key * value / config.chunk_size
        if config.memory == "linear":
            products += 2  # the normaliser of keys and of queries
        return 2.0 * config.key_dim * products


def state_part(name: str) -> str:
    """Which of ``STATE_PARTS`` a tensor of a reading state belongs to."""
    parts = name.split(".")
    if parts[0] == "clock":
        return "clock"
    if "attention" in parts:
        return "attention window"
    if "memory" in parts:
        return "working memory"
    return "CEMA" if "cema" in parts else "timestep norms"
