"""What a rank sees of each batch, made while the step before it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from gecko.data import Batch
from gecko.parallel.mesh import Ranks


class Batches:
    """This rank's rows of the run's batches.

    ``rows`` gives a group of rows, as many as a rank takes, by its number: groups ``step · n`` and the n − 1
    after it make up the batch of a step that n data ranks share. So any number of ranks sees the same batches.
    """

    def __init__(self, rows: Callable[[int], Batch], ranks: Ranks) -> None:
        self._rows, self._ranks = rows, ranks
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """The batch of ``step``, from 0; the next one is begun."""
        ready = self._ahead
        made = ready[1] if ready is not None and ready[0] == step else self._executor.submit(self._make, step)
        batch = made.result()
        self._ahead = (step + 1, self._executor.submit(self._make, step + 1))
        return batch

    def _make(self, step: int) -> Batch:
        return self._rows(step * self._ranks.data_ranks + self._ranks.data_rank)
