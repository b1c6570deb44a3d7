"""Rows for a state that is carried from one step to the next: each lane of a batch reads consecutive rows.

A batch has one row of every lane. A lane's row goes on where its row of the step before ended, so a document that is
longer than a row is read from its start to its end, as far as the lane's part of the epoch reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gecko.data.loader import OrderedRows, Row

LANE_STREAM = 1 << 33
"""First random stream of the epochs' first rows, beyond the streams of mixtures."""


class LaneRows:
    """Rows of ``lanes`` lanes; row i is that of lane i mod ``lanes`` in step i div ``lanes``.

    In each epoch, a lane reads one of ``lanes`` equal parts of consecutive rows, in the epoch's order of documents.
    Rows that are left over, fewer than the lanes, are before the first part and after the last; their division is
    random in each epoch. Segment ids differ for all documents of all epochs, so a state continues in its document only.
    """

    def __init__(self, rows: OrderedRows, lanes: int, seed: int) -> None:
        self.lanes = lanes
        self.rows_per_lane, self._spare = divmod(rows.rows_per_epoch, lanes)
        self.rows_per_epoch = self.rows_per_lane * lanes
        self._rows, self._seed = rows, seed

    def row(self, index: int) -> Row:
        step, lane = divmod(index, self.lanes)
        epoch, row = divmod(step, self.rows_per_lane)
        place = self._first(epoch) + lane * self.rows_per_lane + row
        tokens, targets, segments = self._rows.ordered_row(epoch, place)
        # One more than the documents, because padding is a document too.
        return tokens, targets, segments + epoch * (self._rows.documents + 1)

    def _first(self, epoch: int) -> int:
        """Return the first row of the first lane."""
        draw = np.random.PCG64((self._seed, LANE_STREAM + epoch)).random_raw()
        return int(draw) % (self._spare + 1)


class MixedLanes:
    """Lanes of several sources: the first lanes are of the first source. Each source keeps its lanes."""

    def __init__(self, sources: Sequence[LaneRows]) -> None:
        self._sources = list(sources)
        self._borders = np.cumsum([0, *(rows.lanes for rows in sources)])
        # Until the first lane starts again, a batch has one row of every lane.
        self.rows_per_epoch = min(rows.rows_per_lane for rows in sources) * int(self._borders[-1])

    def row(self, index: int) -> Row:
        step, lane = divmod(index, int(self._borders[-1]))
        source = int(np.searchsorted(self._borders, lane, side="right")) - 1
        rows = self._sources[source]
        return rows.row(step * rows.lanes + lane - int(self._borders[source]))
