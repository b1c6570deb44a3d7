"""Tables of runs that continue after an interruption: a line for each ended run, its code, and intervals over seeds."""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from gecko.runtime.process import code_version, processor_name

RESULTS = Path(__file__).parent / "results" / "evidence"


class Table:
    """A CSV file with a line for each ended run, written at once."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns, self._lock = path, columns, Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            self.add(*columns)

    def rows(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def add(self, *values: object) -> None:
        assert len(values) == len(self._columns)
        with self._lock, self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(values)

    def work_through(
        self, parts: Iterable[Callable[[], Iterator[Any]]], run: Callable[[Any], Sequence[Sequence[object]]], jobs: int
    ) -> None:
        """Run what has no line yet, in several processes, and add the lines that ``run`` returns.

        Args:
            parts: each returns what is to be run, with the first columns as its ``key``, when the part before ended.
        """
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for part in parts:
                ended = [tuple(row.values()) for row in self.rows()]
                open_ = [one for one in part() if not any(line[: len(one.key)] == one.key for line in ended)]
                for future in as_completed([pool.submit(run, one) for one in open_]):
                    for line in future.result():
                        self.add(*line)
                        print(*line[:-2], flush=True)


def rows_of(table: str) -> list[dict[str, str]]:
    """Return the lines of a table of results; none if it was not made yet."""
    path = RESULTS / table
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def code_and_machine() -> tuple[str, str]:
    """Return the commit of a result, which is marked if tracked files differ from it, and the processor."""
    commit, _, dirty = str(code_version()["commit"]).partition("-")
    return "-".join([commit[:7], dirty]).rstrip("-"), processor_name()


def half_width(values: ArrayLike) -> float:
    """Return half of the 95 % interval of a mean by Student's t; 0 for one value, which has no interval."""
    count = np.size(values)
    return float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / count**0.5) if count > 1 else 0.0


def wider(differences: ArrayLike) -> tuple[float, float, float]:
    """Return the mean of differences (seeds, documents) and its 95 % interval.

    The interval is the wider one of Student's t over seeds and over documents, each of the means over the other.
    """
    table = np.asarray(differences)
    middle, half = float(table.mean()), max(half_width(table.mean(axis=axis)) for axis in (0, 1))
    return middle, middle - half, middle + half
