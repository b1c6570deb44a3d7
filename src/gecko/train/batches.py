"""Batches of a run: which rows each step and rank reads, how long they are, and their preparation ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gecko.data import Batch
from gecko.parallel.mesh import Ranks
from gecko.train.run import Run

AHEAD = 4
"""Batches that are made ahead of time. A row that takes long to read then delays no step."""


def batch_of_step(run: Run, rows: Callable[[range], Batch], step: int, ranks: Ranks) -> Batch:
    """Return this rank's rows of ``step``, counted from 0.

    The ranks divide the rows of a step, which do not depend on the number of ranks. Rows are cut into the shorter ones
    of this step.
    """
    count = (run.rows_before(step + 1) - run.rows_before(step)) // ranks.data_ranks
    first = run.rows_before(step) + ranks.data_rank * count
    batch, length = rows(range(first, first + count)), run.length_at(step)
    return Batch(*(x.reshape(-1, length) for x in (batch.tokens, batch.targets, batch.segment_ids)))


class Prefetcher:
    """Makes this rank's rows of each batch in a thread, ``AHEAD`` steps ahead; ``rows`` returns those of a range.

    With ``pinned``, tokens and targets are in memory from which a GPU copies while the host continues.
    """

    def __init__(self, run: Run, rows: Callable[[range], Batch], ranks: Ranks, *, pinned: bool = False) -> None:
        self._run, self._rows, self._ranks, self._pinned = run, rows, ranks, pinned
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next = 0
        self._ahead: deque[Future[Batch]] = deque()
        """Batches from ``_next`` on."""

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of ``step``, counted from 0, and start to make those of the next steps."""
        if step != self._next:
            for made in self._ahead:
                made.cancel()
            self._ahead.clear()
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._executor.submit(self._make, step + len(self._ahead)))
        self._next = step + 1
        return self._ahead.popleft().result()

    def _make(self, step: int) -> Batch:
        batch = batch_of_step(self._run, self._rows, step, self._ranks)
        if not self._pinned:
            return batch
        return Batch(batch.tokens.pin_memory(), batch.targets.pin_memory(), batch.segment_ids)
