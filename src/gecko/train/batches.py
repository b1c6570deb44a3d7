"""Batches of a run: which rows each step and rank reads, how long they are, and their preparation ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gecko.data import Batch
from gecko.parallel.mesh import Ranks
from gecko.train.run import Run


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
    """Makes this rank's rows of each batch, one step ahead in a thread; ``rows`` returns those of a range."""

    def __init__(self, run: Run, rows: Callable[[range], Batch], ranks: Ranks) -> None:
        self._run, self._rows, self._ranks = run, rows, ranks
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """Return this rank's rows of ``step``, counted from 0, and start to make those of the next step."""
        ready = self._ahead
        made = ready[1] if ready is not None and ready[0] == step else self._executor.submit(self._make, step)
        batch = made.result()
        self._ahead = (step + 1, self._executor.submit(self._make, step + 1))
        return batch

    def _make(self, step: int) -> Batch:
        return batch_of_step(self._run, self._rows, step, self._ranks)
