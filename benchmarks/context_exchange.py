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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import parsed, parser_of, publish, table
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

    def post(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], distances: Sequence[int]) -> list[Any]:
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
                sent = self._sender.submit(self._send_late, out, self.rank + distance, due)
                works.append(SimpleNamespace(wait=sent.result))
        return works

    @cached_property
    def _sender(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1)  # sends stay in order; each waits for its own due time

    def _send_late(self, tensor: Tensor, rank: int, due: float) -> None:
        time.sleep(max(0.0, due - time.perf_counter()))
        dist.send(tensor, group=self.group, group_dst=rank)


def passes_on_rank(rank: int, ranks: int, config: GeckoConfig, checkpointing: str, folder: str) -> None:
    """Write to ``folder`` what this rank sends and its batches, and the seconds of each round, forward and backward."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    group = ContextGroup(dist.group.WORLD)
    group.line = line = CountingGroup(dist.group.WORLD)
    model = Gecko(config)
    model.activation_checkpointing = checkpointing
    tokens = torch.randint(config.vocab_size, (1, CHUNKS * config.chunk_size))
    found = []
    for line.delay in (0.0, *(delay for delay in DELAYS for _ in range(ROUNDS))):
        dist.barrier()
        marks = [(line.sent, line.batches, time.perf_counter())]
        loss = model.loss(tokens, tokens, context=group)
        marks.append((line.sent, line.batches, time.perf_counter()))
        loss.backward()
        marks.append((line.sent, line.batches, time.perf_counter()))
        found.append(np.diff(marks, axis=0))
    np.save(f"{folder}/{rank}.npy", found)
    dist.barrier()
    dist.destroy_process_group()


def per_layer(config: GeckoConfig, ranks: int, checkpointing: str) -> np.ndarray:
    """Return bytes, batches and delays waited for of every rank, forward and backward (ranks, 2, 3), for one layer.

    It is the difference of two layers and one. The least of the rounds counts; the first one is not timed.
    """
    totals = []
    for layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ranks, replace(config, num_layers=layers), checkpointing, folder
            mp.spawn(passes_on_rank, arguments, nprocs=ranks)
            rounds = np.stack([np.load(f"{folder}/{rank}.npy") for rank in range(ranks)])
        least = rounds[:, 1:, :, 2].reshape(ranks, len(DELAYS), ROUNDS, 2).min(2)
        slopes = (least[:, -1] - least[:, 0]) / (DELAYS[-1] - DELAYS[0])
        totals.append(np.concatenate([rounds[:, 0, :, :2], slopes[..., None]], axis=-1))
    return totals[1] - totals[0]


def main() -> None:
    given = parsed(parser_of(__doc__, ranks=([2, 4], "numbers of ranks")))
    tiny, large = (GeckoConfig.preset(name) for name in ("tiny", "gecko-7b"))
    sizes, sent, waits = Sizes.of(tiny, 4, 4), [], []
    for ranks in given.ranks:
        for checkpointing in ("none", "full"):
            found = per_layer(tiny, ranks, checkpointing)
            counted = [int(x) for x in found[..., 0].sum(0)]
            if counted != [sizes.sent(ranks)] * 2:
                raise RuntimeError(f"the formula gives {sizes.sent(ranks)} bytes; counted {counted}.")
            waits.append((ranks, checkpointing, *map(int, found[0, :, 1]), *found[..., 2].max(0)))
        busiest, least = int(found[:, 0, 0].max()), sizes.minimum(ranks)
        sent.append((ranks, *counted, sizes.sent(ranks), busiest, least, counted[0] / least))
    of_large, predicted = Sizes.of(large, 4, 2), []
    for ranks in (2, 4, 8):
        numbers = of_large.sent(ranks), of_large.busiest(ranks), of_large.minimum(ranks)
        predicted.append((ranks, *(x / 1e6 for x in numbers), numbers[0] / numbers[2]))
    delays = " and ".join(f"{1e3 * delay:.0f}" for delay in DELAYS)
    publish(
        "context_exchange.md", given, "Exchanges between the ranks of a context group", "",
        "One layer, one row, one direction; backward sends as many bytes the other way. “Least” is (ranks − 1) × what "
        "a border must carry: the last chunk's z and values, and in full precision the final moving average and norm, "
        "one affine map and log z. The term of the map, most of its bytes, is sent in the dtype of the values.",
        "## Batches and delays: tiny, float32",
        "A batch is one call of `batch_isend_irecv`. “Delays waited for” is the time that a layer takes longer with "
        f"sends delayed by {delays} ms, divided by the difference of the delays; the least of {ROUNDS} rounds of the "
        "slowest rank.",
        table(["ranks|,", "activation checkpointing", "batches, forward|,", "batches, backward|,",
               "delays waited for, forward|.1f", "delays waited for, backward|.1f"], waits),
        "## Bytes counted: tiny, float32",
        table(["ranks|,", "forward, all ranks|,", "backward, all ranks|,", "by the formula|,", "busiest rank|,",
               "least|,", "× least|.3f"], sent),
        "## By the formula, not run: gecko-7b, activations and the map's term in bfloat16, the rest in float32",
        table(["ranks|,", "all ranks, MB|.1f", "busiest rank, MB|.1f", "least, MB|.1f", "× least|.3f"], predicted),
    )  # fmt: skip


if __name__ == "__main__":
    main()
