"""Exchanges between the ranks of a context group: batches and bytes per layer, and time against the network's delay.

    python benchmarks/context_exchange.py --write

Batches and bytes are counted for the ``tiny`` architecture with gloo, where a formula must give exactly the same number
of bytes. The formula then gives the bytes of ``gecko-7b``, which is not run. A delay is injected into every send; the
slope of the time of a layer is the number of delays that a layer waits for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine, parser_of, publish
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.parallel.context import ContextGroup, P2PGroup

CHUNKS = 2
"""Chunks per rank; the number of bytes does not depend on it."""

DELAYS = (0.1, 0.3)
"""Seconds by which sends are delayed. Both are long compared with the computation of a layer."""

ROUNDS = 3


@dataclass(frozen=True)
class Sizes:
    """Bytes that one rank sends for one layer and row."""

    to_next: int
    """Bytes to the next rank only: the last chunk's z, from which the next rank computes keys, and its values."""
    to_later: int
    """Bytes to each later rank: norm, CEMA, the memory's weights and affine map, whose term has the values' dtype."""
    border: int
    """Bytes that must cross a border: z and values, and in full precision norm, CEMA, affine map and log z."""

    @classmethod
    def of(cls, config: GeckoConfig, wide: int, narrow: int) -> Sizes:
        """Compute the sizes; ``wide``, ``narrow``: bytes per number of statistics and of activations."""
        key_head, value_head = config.key_head_dim, config.value_head_dim
        norm, cema = 2 * config.timestep_groups * wide, 2 * config.model_dim * config.cema_modes * wide
        window = config.chunk_size * (config.value_dim + config.key_dim) * narrow
        factor, term, log_z = config.key_dim * key_head, config.key_dim * value_head, config.key_dim * wide
        state = norm + cema + log_z + factor * wide
        return cls(window, state + log_z + term * narrow, window + state + term * wide)

    def sent(self, ranks: int) -> int:
        """Return the bytes that all ranks together send in one direction."""
        return (ranks - 1) * self.to_next + ranks * (ranks - 1) // 2 * self.to_later

    def busiest(self, ranks: int) -> int:
        """Return the bytes of the rank that sends most."""
        return self.to_next + (ranks - 1) * self.to_later

    def minimum(self, ranks: int) -> int:
        return (ranks - 1) * self.border


class CountingGroup(P2PGroup):
    """Counts bytes and batches. Sends wait ``delay`` seconds, without delaying the process."""

    sent = batches = 0
    delay = 0.0

    def post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], distances: Sequence[int]) -> list[Work]:
        there = [0 <= self.rank + distance < self.size for distance in distances]
        self.sent += sum(x.nbytes for x, is_there in zip(outgoing, there, strict=True) if is_there)
        self.batches += 1
        if not self.delay:
            return [*super().post(outgoing, incoming, distances)]
        due, works = time.perf_counter() + self.delay, []
        for out, into, distance in zip(outgoing, incoming, distances, strict=True):
            if 0 <= self.rank - distance < self.size:
                works.append(dist.irecv(into, group=self.group, group_src=self.rank - distance))
            if 0 <= self.rank + distance < self.size:
                works.append(Waiting(self._sender.submit(self._send, out, self.rank + distance, due)))
        return works

    @cached_property
    def _sender(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1)  # sends stay in order; each waits for its own due time

    def _send(self, tensor: Tensor, rank: int, due: float) -> None:
        time.sleep(max(0.0, due - time.perf_counter()))
        dist.send(tensor, group=self.group, group_dst=rank)


@dataclass(frozen=True)
class Waiting:
    """A send in another thread."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()


Work = dist.Work | Waiting


@dataclass(frozen=True)
class Pass:
    """What one rank sends in a pass over the model, and the seconds that the pass takes under each of ``DELAYS``."""

    sent: int
    batches: int
    seconds: tuple[float, ...]

    def __sub__(self, other: Pass) -> Pass:
        seconds = tuple(a - b for a, b in zip(self.seconds, other.seconds, strict=True))
        return Pass(self.sent - other.sent, self.batches - other.batches, seconds)

    @property
    def slope(self) -> float:
        """Return the number of delays that the pass waits for, from the shortest and the longest delay."""
        return (self.seconds[-1] - self.seconds[0]) / (DELAYS[-1] - DELAYS[0])


def passes_on_rank(rank: int, ranks: int, config: GeckoConfig, checkpointing: str, folder: str) -> None:
    """Write forward and backward ``Pass`` of this rank to ``folder``."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    group = ContextGroup(dist.group.WORLD)
    group.line = line = CountingGroup(dist.group.WORLD)
    model = Gecko(config)
    model.activation_checkpointing = checkpointing
    tokens = torch.randint(config.vocab_size, (1, CHUNKS * config.chunk_size))
    counts, times = [], []
    for line.delay in (0.0, *(delay for delay in DELAYS for _ in range(ROUNDS))):
        dist.barrier()
        before = line.sent, line.batches, time.perf_counter()
        loss = model.loss(tokens, tokens, context=group)
        middle = line.sent, line.batches, time.perf_counter()
        loss.backward()
        after = line.sent, line.batches, time.perf_counter()
        both = (before, middle), (middle, after)
        counts.append([(end[0] - begin[0], end[1] - begin[1]) for begin, end in both])
        times.append([end[2] - begin[2] for begin, end in both])
    least = [min(column) for delay in range(len(DELAYS)) for column in zip(*_rounds(times, delay), strict=True)]
    torch.save([Pass(*counts[0][i], tuple(least[i::2])) for i in range(2)], f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _rounds(times: list[list[float]], delay: int) -> list[list[float]]:
    """Return the times of the rounds with one of ``DELAYS``; the first of all rounds is not timed."""
    return times[1 + delay * ROUNDS : 1 + (delay + 1) * ROUNDS]


def per_layer(config: GeckoConfig, ranks: int, checkpointing: str) -> list[list[Pass]]:
    """Return forward and backward of every rank for one layer, as the difference of two layers and one."""
    totals = []
    for layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, replace(config, num_layers=layers), checkpointing, folder)
            mp.spawn(passes_on_rank, arguments, nprocs=ranks)
            totals.append([torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)])
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(*totals, strict=True)]


def report(ranks_tried: Sequence[int]) -> list[str]:
    tiny, large = GeckoConfig.preset("tiny"), GeckoConfig.preset("gecko-7b")
    bytes_sent, waits = [], []
    sizes = Sizes.of(tiny, 4, 4)
    for ranks in ranks_tried:
        for checkpointing in ("none", "full"):
            counted = per_layer(tiny, ranks, checkpointing)
            forward, backward = (list(column) for column in zip(*counted, strict=True))
            sent = sum(x.sent for x in forward), sum(x.sent for x in backward)
            if sent != (sizes.sent(ranks), sizes.sent(ranks)):
                raise RuntimeError(f"the formula gives {sizes.sent(ranks)} bytes; counted {sent}.")
            slopes = (max(x.slope for x in some) for some in (forward, backward))
            waits.append(f"| {ranks} | {checkpointing} | {forward[0].batches} | {backward[0].batches} | "
                         + " | ".join(f"{slope:.1f}" for slope in slopes) + " |")  # fmt: skip
        busiest, least = max(x.sent for x in forward), sizes.minimum(ranks)
        bytes_sent.append(f"| {ranks} | {sent[0]:,} | {sent[1]:,} | {sizes.sent(ranks):,} | {busiest:,} | {least:,} | "
                          f"{sent[0] / least:.3f} |")  # fmt: skip
    delays = " and ".join(f"{1e3 * delay:.0f}" for delay in DELAYS)
    lines = [
        "# Exchanges between the ranks of a context group", "",
        f"{date.today()}, {machine()}. Command: `python benchmarks/context_exchange.py --write`.", "",
        "One layer, one row, one direction; backward sends as many bytes the other way. “Least” is (ranks − 1) × what "
        "a border must carry: the last chunk's z and values, and in full precision the final moving average and norm, "
        "one affine map and log z. The term of the map, most of its bytes, is sent in the dtype of the values.", "",
        "## Batches and delays: tiny, float32", "",
        f"A batch is one call of `batch_isend_irecv`. “Delays waited for” is the time that a layer takes longer with "
        f"sends delayed by {delays} ms, divided by the difference of the delays; the least of {ROUNDS} rounds of the "
        "slowest rank.", "",
        "| ranks | activation checkpointing | batches, forward | batches, backward | delays waited for, forward | "
        "delays waited for, backward |",
        "|---:|---|---:|---:|---:|---:|", *waits, "",
        "## Bytes counted: tiny, float32", "",
        "| ranks | forward, all ranks | backward, all ranks | by the formula | busiest rank | least | × least |",
        "|---:|---:|---:|---:|---:|---:|---:|", *bytes_sent,
        "", "## By the formula, not run: gecko-7b, activations and the map's term in bfloat16, the rest in float32", "",
        "| ranks | all ranks, MB | busiest rank, MB | least, MB | × least |", "|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    sizes = Sizes.of(large, 4, 2)
    for ranks in (2, 4, 8):
        sent, least = sizes.sent(ranks), sizes.minimum(ranks)
        lines.append(f"| {ranks} | {sent / 1e6:.1f} | {sizes.busiest(ranks) / 1e6:.1f} | {least / 1e6:.1f} | "
                     f"{sent / least:.3f} |")  # fmt: skip
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    publish("context_exchange.md", report(arguments.ranks), arguments.write)


if __name__ == "__main__":
    main()
