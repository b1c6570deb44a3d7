"""Kills processes of a run again and again: the run must recover and end with the same results.

    python benchmarks/kill_recovery.py              # 20 kills; writes benchmarks/results/kill_recovery.md
    python benchmarks/kill_recovery.py --kills 2

The same small run is trained twice by several gloo processes under ``torchrun --max-restarts``: once undisturbed, and
once with ``kill -9`` of a random process at random moments. Most kills are at a random step and a random time within
it, so in forward, backward, exchange or save; every fourth is while the job is restarting. There is no other
intervention. The loss of every step, the held-out losses and every bit of the last checkpoint are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from gecko.config import GeckoConfig
from gecko.io.checkpoints import SHARDS, checkpoint_step, list_checkpoints
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings
from gecko.train.metrics import read_metrics
from gecko.train.throughput import describe_hardware

RESULTS = Path(__file__).parent / "results" / "kill_recovery.md"
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
        model=model,
        output=str(folder),
        data=DataSettings(source=str(source), validation_fraction=0.2),
        batch_size=4,
        sequence_length=64,
        steps=steps,
        optimizer=OptimizerSettings(learning_rate=5e-3),
        evaluation=EvaluationSettings(every=max(1, steps // 4), rows=4, final_rows=8),
        checkpoint=CheckpointSettings(every=7, keep=2),
        sample=SampleSettings(prompt="red ", tokens=5),
        threads=1,
    )


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

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in order."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                found.append((int(child.environ()["RANK"]), child))
            except (psutil.Error, KeyError):
                continue
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def step(self) -> int:
        records = read_metrics(self.output / "metrics.jsonl")
        return max((record["step"] for record in records), default=0)

    def newest_checkpoint(self) -> int:
        return max((checkpoint_step(path) for path in list_checkpoints(self.output / "checkpoints")), default=0)

    def resumptions(self) -> list[int]:
        """Return the step of each resumption that a session has reported."""
        return [int(step) for step in RESUMED.findall(self.log.read_text(encoding="utf-8"))]

    def wait(self) -> None:
        if self.process.wait() != 0:
            raise RuntimeError(f"the job ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")


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
            _wait_for_step(job, moment)
            time.sleep(choose.uniform(0.0, 0.1))
        done.append(_kill_one(job, choose, "starting" if starting else "training"))
    return done


def _wait_for_step(job: Job, step: int) -> None:
    end = time.monotonic() + PATIENCE
    while job.step() < step:
        if not job.running or time.monotonic() > end:
            raise RuntimeError(f"the job did not come back:\n{job.log.read_text()[-4000:]}")
        time.sleep(0.01)


def _kill_one(job: Job, choose: random.Random, phase: str) -> Kill:
    end = time.monotonic() + PATIENCE
    while not (workers := job.workers()):
        if time.monotonic() > end:
            raise RuntimeError("the job has no processes.")
        time.sleep(0.01)
    step, checkpoint, resumptions = job.step(), job.newest_checkpoint(), len(job.resumptions())
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


def measure(folder: Path, *, kills: int, ranks: int, steps: int, seed: int) -> str:
    """Train twice, compare, and return the report; RuntimeError if the two runs differ."""
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
    seconds = (middle - begin, time.monotonic() - middle)
    resumed = resumed_after(done, job.resumptions())
    same = {
        "Never went back past the newest finished checkpoint": all(
            kill.checkpoint <= (after or 0) for kill, after in zip(done, resumed, strict=True)
        ),
        "Same loss, gradient norm and held-out loss of every step": curve(alone.output) == curve(job.output),
        "Same final held-out loss": _result(alone.output) == _result(job.output),
        "Same last checkpoint, every bit": same_checkpoint(alone.output, job.output),
    }
    report = _report(run, ranks, done, resumed, same, seconds, _result(job.output)["loss"])
    if not all(same.values()):
        raise RuntimeError(report)
    return report


def resumed_after(kills: list[Kill], resumptions: list[int]) -> list[int | None]:
    """Return the step from which the run resumed after each kill; None: from the start. For a session that was killed
    before it resumed, it is the step of the session after it."""
    found: list[int | None] = []
    for kill in kills:
        after = resumptions[kill.resumptions] if kill.resumptions < len(resumptions) else None
        found.append(None if after is not None and kill.checkpoint == 0 and after > kill.step else after)
    return found


def _result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def _report(
    run: Run, ranks: int, kills: list[Kill], resumed: list[int | None], same: dict[str, bool],
    seconds: tuple[float, float], loss: float,
) -> str:  # fmt: skip
    rows = []
    for number, (kill, after) in enumerate(zip(kills, resumed, strict=True), start=1):
        again = "" if after is None else max(0, kill.step - after)
        went_on = "the start" if after is None else after
        cells = (number, kill.rank, kill.phase, kill.step, kill.checkpoint, went_on, again)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    hardware = "; ".join(describe_hardware(torch.device("cpu")).values())
    worst = max(kill.step - (after or 0) for kill, after in zip(kills, resumed, strict=True))
    return "\n".join(
        [
            "# Kill -9 and come back",
            "",
            f"`python benchmarks/kill_recovery.py --kills {len(kills)} --ranks {ranks} --steps {run.steps}`",
            f"on {hardware}.",
            "",
            f"{len(kills)} kills of one of {ranks} processes; a checkpoint every {run.checkpoint.every} steps. "
            f"{seconds[0]:.0f} s left alone, {seconds[1]:.0f} s with kills. Final held-out loss {loss!r} in both runs. "
            f"At most {worst} steps were done again.",
            "",
            *(f"- {what}: {'yes' if equal else 'NO'}" for what, equal in same.items()),
            "",
            "| kill | rank | while | last step seen | finished checkpoint | went on after step | steps done again |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(
            Path(folder), kills=arguments.kills, ranks=arguments.ranks, steps=arguments.steps, seed=arguments.seed
        )
    arguments.out.write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
