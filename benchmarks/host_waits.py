"""Time of a training step against a delay of the control group, which carries values between the hosts of the ranks.

    python benchmarks/host_waits.py --write

Two gloo ranks train ``tiny``. Blocks of steps take turns: without a delay, with a delay of every message of the control
group, and with the delay in a loop that waits for one such message in each step. The third shows that a wait is seen.

The time that the host spends in waits for these messages is measured itself, because the time of a step varies by more
than a millisecond. Processes that sleep also leave the cores to others, so a wait lengthens a step by less than itself.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import parsed, parser_of, publish, table
from torch.distributed.elastic.utils.distributed import get_free_port

from gecko.recipes import get_recipe
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, Run, SampleSettings, train
from gecko.train.trainer import Trainer

RANKS = 2
LENGTH = 256
DELAY = 0.02
"""Seconds by which messages of the control group are late."""
BLOCK = 6
"""Steps of a block. The first is not timed: in it the ranks look at a message of the block before."""
MODES = ("no delay", "delay", "delay, and a loop that waits")
TURNS = (0, 1, 0, 2)
"""Modes of the blocks in turn, so that each block with a delay is between two without."""


class LateWork:
    """A collective of the control group that ends ``delay`` seconds late, and whose wait is timed."""

    def __init__(self, work: dist.Work, delay: float, waited: list[float]) -> None:
        self._work, self._due, self._waited = work, time.perf_counter() + delay, waited

    def wait(self) -> None:
        begin = time.perf_counter()
        self._work.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        self._waited[-1] += time.perf_counter() - begin


class Meter:
    """Delays the control group in blocks of steps, and times every step and its waits for the group."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.waited: list[float] = []
        """Seconds that the host waited for messages of the control group in each step."""
        self._control: dist.ProcessGroup | None = None
        self._all_reduce, self._proceed = dist.all_reduce, Trainer._should_continue

    @property
    def mode(self) -> int:
        """Mode of the step that is running."""
        return TURNS[max(0, len(self.starts) - 1) // BLOCK % len(TURNS)]

    def install(self) -> None:
        def proceeding(trainer: Trainer, stop: Any) -> bool:
            self._control = trainer.ranks.control
            self.starts.append(time.perf_counter())
            self.waited.append(0.0)
            if self.mode == 2:
                trainer.ranks.sum(torch.zeros(2))
            return self._proceed(trainer, stop)

        Trainer._should_continue = proceeding  # type: ignore[method-assign]
        dist.all_reduce = self.all_reduce

    def all_reduce(self, tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        if self._control is None or settings.get("group") is not self._control:
            return self._all_reduce(tensor, *arguments, **settings)
        waits = not settings.pop("async_op", False)
        work = self._all_reduce(tensor, *arguments, **settings, async_op=True)
        assert work is not None
        late = LateWork(work, DELAY if self.mode else 0.0, self.waited)
        if not waits:
            return late
        late.wait()
        return None

    def steps(self) -> list[list[tuple[float, float]]]:
        """Return the seconds of each step and of its waits, in blocks."""
        times = [(end - begin, wait) for (begin, end), wait in zip(pairwise(self.starts), self.waited, strict=False)]
        return [times[first + 1 : first + BLOCK] for first in range(0, len(times) - BLOCK + 1, BLOCK)]


def rank_process(rank: int, port: int, folder: str, steps: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    meter = Meter()
    meter.install()
    train(run_in(Path(folder), steps))
    if rank == 0:
        (Path(folder) / "steps.json").write_text(json.dumps(meter.steps()))


def run_in(folder: Path, steps: int) -> Run:
    return replace(
        get_recipe("tiny"), output=str(folder / "run"), data=DataSettings(source=str(folder / "text.txt")),
        batch_size=RANKS, sequence_length=LENGTH, steps=steps, minutes=None, threads=1,
        evaluation=EvaluationSettings(10**6, 1, 1), checkpoint=CheckpointSettings(every=10**6),
        sample=SampleSettings(tokens=0),
    )  # fmt: skip


def measure(steps: int) -> list[list[tuple[float, float]]]:
    """Return the seconds of each step of the first rank and of its waits, in blocks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text("\n\n".join(f"Line {i} of {i * i % 997}." for i in range(20_000)))
        mp.spawn(rank_process, (get_free_port(), folder, steps), nprocs=RANKS)
        return json.loads(Path(folder, "steps.json").read_text())


def main() -> None:
    given = parsed(parser_of(__doc__, steps=(480, "of the run")))
    blocks = measure(given.steps)
    seconds = [statistics.median(step for step, _ in block) for block in blocks]
    rows = []
    for mode, name in enumerate(MODES):
        own = [block for block in range(len(blocks)) if TURNS[block % len(TURNS)] == mode]
        waits = [1e3 * waited for block in own for _, waited in blocks[block]]
        # Neighbouring blocks are compared, so that a slow minute of the machine slows both.
        inner = [block for block in own if mode and 0 < block < len(blocks) - 1]
        more = [seconds[block] - (seconds[block - 1] + seconds[block + 1]) / 2 for block in inner]
        middle = 1e3 * statistics.median(seconds[block] for block in own)
        added = 1e3 * statistics.median(more) if more else None
        rows.append((name, len(waits), statistics.fmean(waits), max(waits), middle, added))
    publish(
        "host_waits.md", given, "Time of a step against a delay of the control group", "",
        f"{RANKS} gloo ranks train `tiny`, each on a row of {LENGTH} tokens. Messages of the control group are "
        f"{1e3 * DELAY:.0f} ms late. Blocks of {BLOCK} steps take turns; the first step of each is not counted. "
        "“Waited” is the time that the first rank's host spends in waits for these messages. “More” is the median "
        "difference of a block's median step to the mean of the two neighbouring blocks without a delay.",
        table(["steps", "number|,", "ms waited per step, mean|.3f", "largest|.3f", "ms per step, median|.1f",
               "ms more|.2f"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
