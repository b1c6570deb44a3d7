"""The machines that a plan is made for, by the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.config import unknown_name

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class GPU:
    name: str
    memory: int
    """Bytes."""
    peak: float
    """Dense products a second in bfloat16."""
    node_link: float
    """Bytes a second that one GPU sends to another of its node."""
    network: float
    """Bytes a second that one GPU sends to another node."""


GPUS = {
    "a100": GPU("A100 80 GB", 80 * 10**9, 312e12, 300e9, 25e9),
    "h100": GPU("H100 80 GB", 80 * 10**9, 989e12, 450e9, 50e9),
    "h200": GPU("H200 141 GB", 141 * 10**9, 989e12, 450e9, 50e9),
    "b200": GPU("B200 180 GB", 180 * 10**9, 2250e12, 900e9, 50e9),
}
"""NVLink in one direction; one 200 Gb/s (A100) or 400 Gb/s network card for each GPU."""


def find_gpu(name: str) -> GPU:
    """ValueError for an unknown name, with the nearest."""
    if name.lower() not in GPUS:
        raise ValueError(unknown_name("--gpu", name, GPUS))
    return GPUS[name.lower()]
