"""Bytes that one GPU sends in a step of training."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.config import GeckoConfig
from gecko.parallel.mesh import MeshSizes
from gecko.plan.cluster import GPU, GPUS_PER_NODE
from gecko.plan.footprint import FLOAT

HALF = 2


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange: bytes that each GPU sends in a step, and how fast they go."""

    size: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        return self.size / self.bandwidth


@dataclass(frozen=True)
class GroupSizes:
    """Bytes of the groups of parameters that are gathered together."""

    blocks: int
    """All blocks, as they are gathered."""
    rest: int
    """Embedding, final norm and head, float32."""
    gradients: int
    """All gradients, float32."""


def traffic(
    config: GeckoConfig, groups: GroupSizes, sizes: MeshSizes, gpu: GPU, *, parts: int, rows: int, itemsize: int,
    forwards: int,
) -> dict[str, Traffic]:  # fmt: skip
    """What one GPU sends in a step of ``parts`` accumulated parts, of ``rows`` rows in all; ``forwards``: 2 with
    full recomputation. Ring algorithms: of n ranks each sends (n − 1) / n of the whole."""
    divided = sizes.shard * sizes.context
    share = (divided - 1) / divided
    link = _link(gpu, divided)
    copies = (sizes.replicate - 1) / sizes.replicate
    exchange = rows * config.num_layers * context_bytes(config, itemsize, sizes.context) * (forwards + 1)
    return {
        "gather weights": Traffic(share * parts * (2 * groups.blocks + groups.rest), link),
        "reduce gradients": Traffic(share * groups.gradients, link),
        "sum over replicas": Traffic(2 * copies * groups.gradients / divided, _link(gpu, divided * sizes.replicate)),
        "context exchange": Traffic(exchange if sizes.context > 1 else 0, _link(gpu, sizes.context)),
    }


def context_bytes(config: GeckoConfig, itemsize: int, ranks: int) -> int:
    """Bytes that the busiest of so many context ranks sends in a layer's forward pass, a row; backward, as many.

    To the next rank: the last attention chunk's keys (float32) and values, and the memory's summary of that chunk.
    To every later one: the moving average's state, the norm's, the memory's affine map A, B and two weights.
    ``benchmarks/context_exchange.py`` counts them.
    """
    heads, key, value = config.num_heads, config.key_head_dim, config.value_head_dim
    window = (
        0 if config.attention == "chunk" else config.chunk_size * (FLOAT * config.key_dim + itemsize * config.value_dim)
    )
    later = FLOAT * (2 * config.model_dim * config.cema_modes + 2 * config.timestep_groups)
    affine = 0
    if config.memory != "none":
        affine = FLOAT * heads * key * (key + value)
        later += affine + 2 * FLOAT * config.key_dim
    return window + affine + (ranks - 1) * later


def _link(gpu: GPU, ranks: int) -> float:
    """A ring is as fast as its slowest link."""
    return gpu.node_link if ranks <= GPUS_PER_NODE else gpu.network
