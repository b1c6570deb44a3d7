"""Kills processes of a run again and again: the run must recover and end with the same results.

    python benchmarks/kill_recovery.py              # 20 kills; writes benchmarks/results/kill_recovery.md
    python benchmarks/kill_recovery.py --kills 2

The same small run is trained twice by several gloo processes under ``torchrun --max-restarts``: once undisturbed, and
once with ``kill -9`` of a random process at random moments. Most kills are at a random step and a random time within
it, so in forward, backward, exchange or save; every fourth is while the job is restarting. There is no other
intervention. The loss of every step, the held-out losses and every bit of the last checkpoint are compared.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import RESULTS, machine, parsed, parser_of, table
from safetensors.torch import load_file

from gecko.config import GeckoConfig
from gecko.io.checkpoints import SHARDS, checkpoint_step, list_checkpoints
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings
from gecko.train.metrics import read_metrics

RESUMED = re.compile(r"continuing after step (\d+)")
PATIENCE = 180
"""Seconds without progress after which a job counts as lost."""
_TIMES = ("seconds", "tokens_per_second", "mfu", "memory_gib", "data_seconds")


@dataclass(frozen=True)
class Kill:
    rank: int
    phase: str
    step: int
    """Last step in the metrics."""
    checkpoint: int
    """Step of the newest finished checkpoint; 0 if there is none."""
    resumptions: int
    """Number of sessions that had resumed from a checkpoint before."""


def small_run(folder: Path, steps: int) -> Run:
    source = folder / "text"
    source.mkdir()
    choose = random.Random(0)
    words = ["red", "green", "blue", "stone", "river", "runs", "falls", "slowly", "over", "under"]
    for number in range(40):
        (source / f"{number:02d}.txt").write_text(" ".join(choose.choices(words, k=80)), encoding="utf-8")
    model = GeckoConfig(
        vocab_size=257, num_layers=2, model_dim=32, key_dim=16, value_dim=32, num_heads=2, ffn_dim=32, cema_modes=4,
        chunk_size=8, timestep_groups=4,
    )  # fmt: skip
    return Run(
        model=model, output=str(folder), data=DataSettings(source=str(source), validation_fraction=0.2), batch_size=4,
        sequence_length=64, steps=steps, optimizer=OptimizerSettings(learning_rate=5e-3),
        evaluation=EvaluationSettings(every=max(1, steps // 4), rows=4, final_rows=8),
        checkpoint=CheckpointSettings(every=7, keep=2), sample=SampleSettings(prompt="red ", tokens=5), threads=1,
    )  # fmt: skip


class Job:
    """The run under torchrun, in its own folder, with changes to the recipe."""

    def __init__(self, recipe: Path, output: Path, ranks: int, restarts: int, overrides: Sequence[str] = ()) -> None:
        self.output = output
        self.log = output.with_suffix(".log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"),
            *(f"--max-restarts={restarts}", "-m", "gecko", "train", str(recipe), f"output={output}", "--resume"),
            *overrides,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in order."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                found.append((int(child.environ()["RANK"]), child))
            except (psutil.Error, KeyError):
                continue
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def newest_checkpoint(self) -> int:
        return max((checkpoint_step(path) for path in list_checkpoints(self.output / "checkpoints")), default=0)

    def wait(self) -> None:
        if self.process.wait() != 0:
            raise RuntimeError(f"the job ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")


def last_step(output: Path) -> int:
    return max((record["step"] for record in read_metrics(output / "metrics.jsonl")), default=0)


def resumptions_in(log: Path) -> list[int]:
    """Return the step of each resumption that the sessions of a log have reported."""
    return [int(step) for step in RESUMED.findall(log.read_text(encoding="utf-8") if log.exists() else "")]


def kill_at_random(job: Job, kills: int, steps: int, seed: int) -> list[Kill]:
    """Kill ``kills`` times, each after the job has made progress since the last kill."""
    choose = random.Random(seed)
    moments = sorted(choose.sample(range(3, steps - 3), kills))
    done: list[Kill] = []
    for number, moment in enumerate(moments):
        starting = number % 4 == 3
        if starting:
            time.sleep(choose.uniform(0.5, 6.0))
        else:
            wait_until(lambda: last_step(job.output) >= moment, job)  # noqa: B023
            time.sleep(choose.uniform(0.0, 0.1))
        done.append(_kill_one(job, choose, "starting" if starting else "training"))
    return done


def wait_until(happened: Callable[[], object], job: Job) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        if job.process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the job did not come back:\n{job.log.read_text()[-4000:]}")
        time.sleep(0.01)


def _kill_one(job: Job, choose: random.Random, phase: str) -> Kill:
    wait_until(job.workers, job)
    workers = job.workers()
    step, checkpoint, resumptions = last_step(job.output), job.newest_checkpoint(), len(resumptions_in(job.log))
    rank = choose.randrange(len(workers))
    workers[rank].send_signal(signal.SIGKILL)
    workers[rank].wait()
    return Kill(rank, phase, step, checkpoint, resumptions)


def curve(folder: Path) -> list[dict[str, Any]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in _TIMES} for record in records]


def same_checkpoint(left: Path, right: Path) -> bool:
    """Return whether parameters and optimizer state of the newest checkpoints are bitwise equal."""
    ends = [list_checkpoints(folder / "checkpoints")[0] for folder in (left, right)]
    files = [sorted((end / SHARDS).iterdir()) for end in ends]
    if [file.name for file in files[0]] != [file.name for file in files[1]] or ends[0].name != ends[1].name:
        return False
    for one, other in zip(*files, strict=True):
        a, b = load_file(one), load_file(other)
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return True


def resumed_after(kills: list[Kill], resumptions: list[int]) -> list[int | None]:
    """Return the step from which the run resumed after each kill; None: from the start. For a session that was killed
    before it resumed, it is the step of the session after it."""
    found: list[int | None] = []
    for kill in kills:
        after = resumptions[kill.resumptions] if kill.resumptions < len(resumptions) else None
        found.append(None if after is not None and kill.checkpoint == 0 and after > kill.step else after)
    return found


def measure(folder: Path, kills: int, ranks: int, steps: int, seed: int) -> str:
    """Train twice, compare, and return the page; RuntimeError if the two runs differ."""
    recipe = folder / "run.json"
    run = small_run(folder, steps)
    run.save(recipe)
    begin = time.monotonic()
    alone = Job(recipe, folder / "alone", ranks, 0)
    alone.wait()
    middle = time.monotonic()
    job = Job(recipe, folder / "killed", ranks, kills + 3)
    done = kill_at_random(job, kills, steps, seed)
    job.wait()
    seconds = middle - begin, time.monotonic() - middle
    pairs = list(zip(done, resumed_after(done, resumptions_in(job.log)), strict=True))
    ends = [json.loads((one.output / "results.json").read_text(encoding="utf-8")) for one in (alone, job)]
    same = {
        "Never went back past the newest finished checkpoint": all(x.checkpoint <= (after or 0) for x, after in pairs),
        "Same loss, gradient norm and held-out loss of every step": curve(alone.output) == curve(job.output),
        "Same final held-out loss": ends[0] == ends[1],
        "Same last checkpoint, every bit": same_checkpoint(alone.output, job.output),
    }
    rows = (
        (str(number), str(x.rank), x.phase, str(x.step), str(x.checkpoint),
         "the start" if after is None else str(after), "" if after is None else str(max(0, x.step - after)))
        for number, (x, after) in enumerate(pairs, start=1)
    )  # fmt: skip
    columns = ["kill", "rank", "while", "last step seen", "finished checkpoint", "went on after step",
               "steps done again"]  # fmt: skip
    page = "\n\n".join([
        "# Kill -9 and come back",
        f"`python benchmarks/kill_recovery.py --kills {kills} --ranks {ranks} --steps {steps}`\non {machine()}.",
        f"{kills} kills of one of {ranks} processes; a checkpoint every {run.checkpoint.every} steps. {seconds[0]:.0f} "
        f"s left alone, {seconds[1]:.0f} s with kills. Final held-out loss {ends[1]['loss']!r} in both runs. At most "
        f"{max(x.step - (after or 0) for x, after in pairs)} steps were done again.",
        "\n".join(f"- {what}: {'yes' if equal else 'NO'}" for what, equal in same.items()),
        table(columns, rows) + "\n",
    ])  # fmt: skip
    if not all(same.values()):
        raise RuntimeError(page)
    return page


def main() -> None:
    parser = parser_of(
        __doc__, write=False, kills=(20, "of a process"), ranks=(2, "processes"), steps=(300, "of the run"),
        seed=(0, "of the moments"), out=(RESULTS / "kill_recovery.md", "file of the page"),
    )  # fmt: skip
    given = parsed(parser)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        page = measure(Path(folder), given.kills, given.ranks, given.steps, given.seed)
    given.out.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
