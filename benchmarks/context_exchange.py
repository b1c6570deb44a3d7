"""Bytes that ranks of a context group send per layer, compared with what must cross the borders between ranks.

    python benchmarks/context_exchange.py --write

Bytes are counted for the ``tiny`` architecture with gloo, where a formula must give exactly the same number. The
formula then gives the bytes of ``gecko-7b``, which is not run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.parallel.context import ContextGroup
from gecko.parallel.p2p import P2PGroup
from gecko.train.throughput import describe_hardware

RESULTS = Path(__file__).parent / "results" / "context_exchange.md"
CHUNKS = 2
"""Chunks per rank; the number of bytes does not depend on it."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that one rank sends for one layer and row."""

    to_next: int
    """Bytes to the next rank only: keys and values of the last chunk, and its summary."""
    to_later: int
    """Bytes to each later rank: norm, CEMA, the memory's weights and affine map."""
    border: int
    """Bytes that must cross a border: norm, CEMA, keys and values, affine map, log z."""

    @classmethod
    def of(cls, config: GeckoConfig, wide: int, value: int, key: int) -> Sizes:
        """Compute the sizes; ``wide``, ``value``, ``key``: bytes per number of statistics, values and keys."""
        key_head, value_head = config.key_head_dim, config.value_head_dim
        norm, cema = 2 * config.timestep_groups * wide, 2 * config.model_dim * config.cema_modes * wide
        window = config.chunk_size * (config.value_dim * value + config.key_dim * key)
        affine = config.num_heads * key_head * (key_head + value_head) * wide
        log_z = config.key_dim * wide
        return cls(window + affine, norm + cema + 2 * log_z + affine, norm + cema + window + affine + log_z)

    def sent(self, ranks: int) -> int:
        """Return the bytes that all ranks together send in one direction."""
        return (ranks - 1) * self.to_next + ranks * (ranks - 1) // 2 * self.to_later

    def busiest(self, ranks: int) -> int:
        """Return the bytes of the rank that sends most."""
        return self.to_next + (ranks - 1) * self.to_later

    def minimum(self, ranks: int) -> int:
        return (ranks - 1) * self.border


class CountingGroup(P2PGroup):
    sent = 0

    def post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], distances: Sequence[int]) -> list[dist.Work]:
        there = [0 <= self.rank + distance < self.size for distance in distances]
        self.sent += sum(x.nbytes for x, is_there in zip(outgoing, there, strict=True) if is_there)
        return super().post(outgoing, incoming, distances)


def count_on_rank(rank: int, ranks: int, config: GeckoConfig, folder: str) -> None:
    """Write the number of bytes that this rank sends forward and backward to ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    group = ContextGroup(dist.group.WORLD)
    group.line = line = CountingGroup(dist.group.WORLD)
    tokens = torch.randint(config.vocab_size, (1, CHUNKS * config.chunk_size))
    loss = Gecko(config).loss(tokens, tokens, context=group)
    forward = line.sent
    loss.backward()
    torch.save((forward, line.sent - forward), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def count(config: GeckoConfig, ranks: int) -> list[tuple[int, int]]:
    """Return forward and backward bytes of every rank for one layer, as the difference of two layers and one."""
    totals = []
    for layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, replace(config, num_layers=layers), folder)
            mp.spawn(count_on_rank, arguments, nprocs=ranks)
            totals.append([torch.load(f"{folder}/{rank}") for rank in range(ranks)])
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(*totals, strict=True)]


def report(ranks_tried: Sequence[int]) -> str:
    tiny, large = GeckoConfig.preset("tiny"), GeckoConfig.preset("gecko-7b")
    machine = "; ".join(describe_hardware(torch.device("cpu")).values())
    lines = [
        "# Bytes between the ranks of a context group", "",
        f"{date.today()}, {machine}. Command: `python benchmarks/context_exchange.py --write`.", "",
        "One layer, one row, one direction; backward sends as many the other way. “Least” is (ranks − 1) × what a "
        "border must carry: the final moving average and norm, the last chunk's keys and values, one affine map "
        "and log z.", "",
        "## Counted: tiny, float32", "",
        "| ranks | forward, all ranks | backward, all ranks | by the formula | busiest rank | least | × least |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    sizes = Sizes.of(tiny, 4, 4, 4)
    for ranks in ranks_tried:
        counted = count(tiny, ranks)
        forward, backward = (sum(column) for column in zip(*counted, strict=True))
        if not forward == backward == sizes.sent(ranks):
            raise RuntimeError(f"the formula gives {sizes.sent(ranks)} bytes; counted {forward} and {backward}.")
        busiest, least = max(sent for sent, _ in counted), sizes.minimum(ranks)
        lines.append(f"| {ranks} | {forward:,} | {backward:,} | {sizes.sent(ranks):,} | {busiest:,} | {least:,} | "
                     f"{forward / least:.3f} |")  # fmt: skip
    lines += [
        "", "## By the formula, not run: gecko-7b, values in bfloat16, keys and statistics in float32", "",
        "| ranks | all ranks, MB | busiest rank, MB | least, MB | × least |", "|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    sizes = Sizes.of(large, 4, 2, 4)
    for ranks in (2, 4, 8):
        sent, least = sizes.sent(ranks), sizes.minimum(ranks)
        lines.append(f"| {ranks} | {sent / 1e6:.1f} | {sizes.busiest(ranks) / 1e6:.1f} | {least / 1e6:.1f} | "
                     f"{sent / least:.3f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    arguments = parser.parse_args()
    text = report(arguments.ranks)
    print(text)
    if arguments.write:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
