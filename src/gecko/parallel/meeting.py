"""How the ranks of one start of a job find each other, and nobody of an earlier start.

torchrun keeps one key-value store over all restarts, and PyTorch writes to the same keys each time: a rank that is
faster than another finds the address that the other one's killed predecessor left there. So the ranks first agree
on a part of the store that nobody wrote to before.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

_PAUSE = 0.02
"""Seconds between two looks."""


def meet(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """An empty part of ``store``, the same for all ranks of this start.

    Each writes a random word; the first reads them out with a word of its own, until each has heard itself and
    answered with the first one's: only processes that run at the same time can do that. RuntimeError at ``timeout``.
    """
    word = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    meeting = _read_out(store, word, world, deadline) if rank == 0 else _listen(store, word, rank, deadline)
    return PrefixStore(f"gecko/{meeting}", store)


def _read_out(store: Store, word: str, world: int, deadline: float) -> str:
    others = range(1, world)
    while True:
        words = _written(store, [f"gecko/word/{rank}" for rank in others])
        if words:
            store.set("gecko/read-out", " ".join([word, *words]))
            if set(_written(store, [f"gecko/answer/{rank}" for rank in others])) == {word}:
                return word
        _pause(deadline)


def _listen(store: Store, word: str, rank: int, deadline: float) -> str:
    store.set(f"gecko/word/{rank}", word)
    while True:
        said = _written(store, ["gecko/read-out"])
        heard = said[0].split() if said else []
        if rank < len(heard) and heard[rank] == word:
            store.set(f"gecko/answer/{rank}", heard[0])
            return heard[0]
        _pause(deadline)


def _written(store: Store, keys: list[str]) -> list[str]:
    """What is under ``keys``; nothing where one is missing, for which ``get`` would wait, and raise its own error."""
    return [store.get(key).decode() for key in keys] if store.check(keys) else []


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError("all ranks of the job must start within the time limit; some did not. See their logs.")
    time.sleep(_PAUSE)
