"""Floating-point operations of training on one token, by part, as the code computes them.

Two for a multiplication and its addition, in products of matrices; what is done element by element is left out. For
a layer, with D, Z, V, F the model's, key, value and feed-forward widths, z = Z / heads, v = V / heads, G norm groups,
N modes, c the attention chunk, w the attention window and C = 64 the scan chunk:

    part        forward                             backward
    linear      2 (Z D + 2 V D + D² + V D + 3 F D)  twice (2 F D without the gate of SwiGLU)
    attention   2 w (Z + V)                         2 w (3 Z + 2 V): scores are computed again
    memory      2 Z (z + 2 v + z v / c)             twice
    CEMA        D (2 C + 8 N)                       twice
    norms       4 G (C + 1)                         4 G (C + 1 + D)
    head        2 D · vocabulary                    twice (once for the model)

Attention computes whole windows and masks half of one chunk, so it needs less than it computes: MFU counts what is
needed (``gecko.train.utilisation``).
"""

from __future__ import annotations

from typing import NamedTuple

from gecko.config import GeckoConfig
from gecko.ops.scan_plan import SCAN_CHUNK


class Flops(NamedTuple):
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def flops_by_part(config: GeckoConfig) -> dict[str, Flops]:
    """FLOPs a token of a row that is long against a chunk, all layers together."""
    layers, model_dim = config.num_layers, config.model_dim
    norm = 4.0 * config.timestep_groups * (SCAN_CHUNK + 1)
    window = config.chunk_size * (1 if config.attention == "chunk" else 2)
    key_dim, value_dim = config.key_dim, config.value_dim
    return {
        "linear": _twice_backward(layers * _linear(config)),
        "attention": Flops(
            layers * 2.0 * window * (key_dim + value_dim), layers * 2.0 * window * (3 * key_dim + 2 * value_dim)
        ),
        "memory": _twice_backward(layers * _memory(config)),
        "CEMA": _twice_backward(layers * model_dim * (2.0 * SCAN_CHUNK + 8 * config.cema_modes)),
        "norms": Flops((layers + 1) * norm, (layers + 1) * (norm + 4 * config.timestep_groups * model_dim)),
        "head": _twice_backward(2.0 * model_dim * config.vocab_size),
    }


def _linear(config: GeckoConfig) -> float:
    maps = config.key_dim + 3 * config.value_dim + config.model_dim + (3 if config.swiglu else 2) * config.ffn_dim
    return 2.0 * config.model_dim * maps


def _memory(config: GeckoConfig) -> float:
    if config.memory == "none":
        return 0.0
    key, value = config.key_head_dim, config.value_head_dim
    products = key + 2 * value + key * value / config.chunk_size
    if config.memory == "linear":
        products += 2  # the normaliser of keys and of queries
    return 2.0 * config.key_dim * products


def _twice_backward(forward: float) -> Flops:
    return Flops(forward, 2 * forward)
