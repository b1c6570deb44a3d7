"""Data sheets of GPUs, and the bytes that one GPU sends in a training step."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.config import unknown_name
from gecko.models.registry import ModelConfig
from gecko.parallel.mesh import MeshSizes
from gecko.plan.counts import counts_of

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class GPU:
    """Memory and speed of a GPU, from the vendor's data sheet."""

    name: str
    memory: int
    """Memory in bytes."""
    peak: float
    """Peak dense FLOP/s in bfloat16."""
    node_link: float
    """Bytes/s that one GPU sends to another of its node."""
    network: float
    """Bytes/s that one GPU sends to another node."""


GPUS = {
    "a100": GPU("A100 80 GB", 80 * 10**9, 312e12, 300e9, 25e9),
    "h100": GPU("H100 80 GB", 80 * 10**9, 989e12, 450e9, 50e9),
    "h200": GPU("H200 141 GB", 141 * 10**9, 989e12, 450e9, 50e9),
    "b200": GPU("B200 180 GB", 180 * 10**9, 2250e12, 900e9, 50e9),
}
"""Links: NVLink in one direction, and one network card of 200 Gb/s (A100) or 400 Gb/s per GPU."""


def find_gpu(name: str) -> GPU:
    """Return the GPU of that name.

    Raises:
        ValueError: the name is unknown.
    """
    if name.lower() not in GPUS:
        raise ValueError(unknown_name("--gpu", name, GPUS))
    return GPUS[name.lower()]


@dataclass(frozen=True)
class Traffic:
    """One kind of communication in a step."""

    size: float
    """Bytes that each GPU sends."""
    bandwidth: float
    """Bytes/s."""

    @property
    def seconds(self) -> float:
        return self.size / self.bandwidth


@dataclass(frozen=True)
class GroupSizes:
    """Bytes of the parameter groups that FSDP gathers together."""

    blocks: int
    """Bytes of all blocks, in the dtypes in which they are gathered."""
    rest: int
    """Bytes of embedding, final norm and head in float32."""
    gradients: int
    """Bytes of all gradients in float32."""


def traffic(
    config: ModelConfig, groups: GroupSizes, sizes: MeshSizes, gpu: GPU, *, parts: int, rows: int, itemsize: int,
    forwards: int,
) -> dict[str, Traffic]:  # fmt: skip
    """Return the bytes that one GPU sends in a step, by kind.

    Collectives use ring algorithms: each of n ranks sends (n − 1) / n of the whole.

    Args:
        parts: accumulated parts of the step.
        rows: rows of all parts together, on this GPU.
        itemsize: bytes per number of the context exchange.
        forwards: forward passes per step; 2 with recomputation.
    """
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
    """Return the bandwidth of a ring of ``ranks`` GPUs, which is that of its slowest link."""
    return gpu.node_link if ranks <= GPUS_PER_NODE else gpu.network
