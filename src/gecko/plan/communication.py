"""Bytes that one GPU sends in a step of training."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.baselines import ModelConfig
from gecko.parallel.mesh import MeshSizes
from gecko.plan.cluster import GPU, GPUS_PER_NODE
from gecko.plan.counts import counts_of


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
    config: ModelConfig, groups: GroupSizes, sizes: MeshSizes, gpu: GPU, *, parts: int, rows: int, itemsize: int,
    forwards: int,
) -> dict[str, Traffic]:  # fmt: skip
    """What one GPU sends in a step of ``parts`` accumulated parts, of ``rows`` rows in all; ``forwards``: 2 with
    full recomputation. Ring algorithms: of n ranks each sends (n − 1) / n of the whole."""
    divided = sizes.shard * sizes.context
    share = (divided - 1) / divided
    link = _link(gpu, divided)
    copies = (sizes.replicate - 1) / sizes.replicate
    exchanged = counts_of(config).context_bytes(itemsize, sizes.context)
    exchange = rows * config.num_layers * exchanged * (forwards + 1)
    return {
        "gather weights": Traffic(share * parts * (2 * groups.blocks + groups.rest), link),
        "reduce gradients": Traffic(share * groups.gradients, link),
        "sum over replicas": Traffic(2 * copies * groups.gradients / divided, _link(gpu, divided * sizes.replicate)),
        "context exchange": Traffic(exchange if sizes.context > 1 else 0, _link(gpu, sizes.context)),
    }


def _link(gpu: GPU, ranks: int) -> float:
    """A ring is as fast as its slowest link."""
    return gpu.node_link if ranks <= GPUS_PER_NODE else gpu.network
