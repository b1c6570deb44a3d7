"""Tables of runs that continue after an interruption: lines of each ended run, its code, choices and intervals."""

from __future__ import annotations

import argparse
import csv
import lzma
import math
import multiprocessing
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats

import gecko
from gecko.io.files import whole_file
from gecko.recipes import apply_overrides, get_recipe
from gecko.runtime.process import code_version, keep_freed_memory, processor_name
from gecko.train import NonFiniteError, train

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "evidence"
WHERE = ("commit", "source", "processor")
"""Last columns of each table: the commit, the git tree of ``src``, and the processor."""
T = TypeVar("T")


def git(*arguments: str) -> str:
    """Return what git prints for this checkout; nothing where git fails or is missing."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def code() -> tuple[str, str]:
    """Return the commit and the tree of ``src``, marked if the code that runs is other than that.

    Tables of results are no code: runs add lines to them.
    """
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", ":!benchmarks/results")
    mark = "-dirty" * bool(changed or not Path(gecko.__file__).is_relative_to(ROOT))
    commit = str(code_version()["commit"]).removesuffix("-dirty")[:7]
    return commit + mark, git("rev-parse", "--short=7", "HEAD:src") + mark


CODE = code()
"""That of the process that does the work, when it imported this file: later commits do not change what it runs."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where runs are computed, as ``device=auto`` of a training run has it."""


def processor() -> str:
    """Return the name of what computes the runs."""
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor_name()


class Table:
    """A CSV file of ``RESULTS`` with the lines of each ended run, written at once.

    Raises:
        ValueError: the file has other columns.
    """

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self._path, self._columns = RESULTS / name, columns
        if not self._path.is_file():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.add([columns])
        for text in _texts(name):
            if (found := next(csv.reader(text.splitlines()), [])) != list(columns):
                raise ValueError(f"{self._path} must have the columns {', '.join(columns)}; it has {', '.join(found)}.")

    def add(self, lines: Sequence[Sequence[object]]) -> None:
        assert all(len(line) == len(self._columns) for line in lines)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)

    def work_through(
        self,
        parts: Iterable[Callable[[], Iterable[Any]]],
        run: Callable[[Any], Sequence[Sequence[object]]],
        jobs: int,
    ) -> None:
        """Run what lacks lines, in several processes, and add the lines that ``run`` returns.

        A run that fails costs no other. Ctrl-C gives up those that have not begun.

        Args:
            parts: each returns runs when the part before ended; ``key`` has first columns, ``lines`` their number.

        Raises:
            ExceptionGroup: the errors of the runs that failed.
        """
        errors = list[Exception]()
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for part in parts:
                ended = [tuple(row.values()) for row in rows_of(self._path.name)]
                open_ = [one for one in part() if sum(line[: len(one.key)] == one.key for line in ended) < one.lines]
                begun = {pool.submit(run, one): one for one in open_}
                try:
                    for future in as_completed(begun):
                        if (error := future.exception()) is None:
                            self.add(future.result())
                            print(*begun[future].key, flush=True)
                        else:
                            error.add_note(f"in {' '.join(begun[future].key)}")
                            errors.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                            print("failed:", *begun[future].key, repr(error), flush=True)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        if errors:
            raise ExceptionGroup(f"{len(errors)} runs failed; the same command tries them again", errors)


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments with those that all scripts have; tables are in the folder that they name from now on."""
    global RESULTS
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    given = parser.parse_args()
    RESULTS = given.results
    return given


def _texts(table: str) -> Iterator[str]:
    """Yield the packed file of a table and the one with lines of later runs, those that exist."""
    path = RESULTS / table
    if (packed := path.with_name(f"{table}.xz")).is_file():
        yield lzma.decompress(packed.read_bytes()).decode()
    if path.is_file():
        yield path.read_text(encoding="utf-8")


def rows_of(table: str) -> list[dict[str, str]]:
    """Return the lines of a table of results; none if it was not made yet."""
    return [row for text in _texts(table) for row in csv.DictReader(text.splitlines())]


def pack() -> None:
    """Move the lines of all tables to packed files, which are part of the repository."""
    for path in RESULTS.glob("*.csv"):
        # Each line once: the header of both files, and lines that were packed before a kill.
        lines = dict.fromkeys("".join(_texts(path.name)).splitlines(keepends=True))
        packed = lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
        with whole_file(path.with_name(f"{path.name}.xz")) as temporary:
            temporary.write_bytes(packed)
        path.unlink()


def trained(recipe: str, overrides: Sequence[str], folder: Path) -> tuple[Path | None, tuple[str, str, str]]:
    """Train a run, or continue it, on one thread; what it prints is in a log beside its folder.

    Return its last checkpoint, None if training diverges, and the columns ``WHERE`` with the code of all its sessions.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.code").open("a+", encoding="utf-8") as file:
        file.write(" ".join(CODE) + "\n")
        file.seek(0)
        commits, sources = zip(*(line.split() for line in dict.fromkeys(file)), strict=True)
    where = "+".join(dict.fromkeys(commits)), "+".join(dict.fromkeys(sources)), processor()
    run = replace(apply_overrides(get_recipe(recipe), overrides), output=str(folder))
    with folder.with_name(f"{folder.name}.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            result = train(run, resume=True)
        except NonFiniteError:
            return None, where
    if not result.finished:
        raise InterruptedError(f"{folder} was interrupted; the same command continues.")
    return result.checkpoint, where


def best(losses: Mapping[T, float]) -> T | None:
    """Return what has the least loss; None if there is no finite one."""
    return min((one for one in losses if math.isfinite(losses[one])), key=lambda one: losses[one], default=None)


class Interval(NamedTuple):
    """A mean and its interval, whose ends are NaN where there is one seed."""

    mean: float
    low: float
    high: float

    def shown(self, digits: int = 4) -> str:
        if math.isnan(self.mean):
            return "diverged"
        if math.isnan(self.low):
            return f"{self.mean:+.{digits}f} (one seed: no interval)"
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def over_seeds(values: ArrayLike, level: float = 0.05) -> Interval:
    """Return a mean and its interval by Student's t; of one value there is none."""
    x = np.asarray(values, float)
    if x.size < 2:
        return Interval(float(x.mean()), math.nan, math.nan)
    half = float(stats.t.ppf(1 - level / 2, x.size - 1) * x.std(ddof=1) / x.size**0.5)
    return Interval(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half)


def over_seeds_and_documents(differences: ArrayLike, level: float = 0.05) -> Interval:
    """Return the mean of differences (seeds, documents) and its interval at ``level``.

    The variance is the sum of those of the mean over seeds and over documents, with Satterthwaite's degrees of freedom.
    The interval is never narrower than Student's t over either alone, the rule of the first runs.
    """
    table = np.asarray(differences, float)
    middle = float(table.mean())
    if min(table.shape) < 2 or not math.isfinite(middle):
        return Interval(middle, math.nan, math.nan)
    means = [table.mean(axis=axis) for axis in (1, 0)]
    parts = [float(np.var(values, ddof=1)) / values.size for values in means]
    freedom = sum(parts) ** 2 / max(sum(p**2 / (v.size - 1) for p, v in zip(parts, means, strict=True)), 1e-300)
    half = float(stats.t.ppf(1 - level / 2, max(freedom, 1)) * sum(parts) ** 0.5)
    alone = [over_seeds(values, level) for values in means]
    return Interval(
        middle, min(middle - half, *(one.low for one in alone)), max(middle + half, *(one.high for one in alone))
    )
