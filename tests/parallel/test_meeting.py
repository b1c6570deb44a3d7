"""Ranks of one job find each other, whatever an earlier job left in the store."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gecko.parallel.mesh import fresh_rendezvous

LIMIT = timedelta(seconds=20)


def start(store: dist.Store, world: int, seed: int) -> list[str]:
    """Start all ranks with random delays; return the address that each one reads in the store they agreed on."""
    choose = random.Random(seed)
    delays = [choose.uniform(0, 0.1) for _ in range(world)]
    found: list[str] = [""] * world

    def rank_of(rank: int) -> None:
        time.sleep(delays[rank])
        part = fresh_rendezvous(store, rank, world, LIMIT)
        assert not part.check(["address"]) or rank != 0
        if rank == 0:
            part.set("address", f"start {seed}")
        found[rank] = part.get("address").decode()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_start_in_one_store_is_by_itself(world: int) -> None:
    store = dist.HashStore()
    for seed in range(8):
        assert start(store, world, seed) == [f"start {seed}"] * world


def test_a_rank_that_waits_for_others_of_an_earlier_start_gives_up() -> None:
    store = dist.HashStore()
    start(store, 2, 0)
    with pytest.raises(RuntimeError, match="all ranks of the job must start"):
        fresh_rendezvous(store, 1, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_of_a_first_start_gives_up(rank: int) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="all ranks of the job must start"):
        fresh_rendezvous(store, rank, 2, timedelta(seconds=0.2))
