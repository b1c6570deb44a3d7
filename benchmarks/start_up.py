"""Seconds from the start of a process to the end of its first training step, with cold caches.

    python benchmarks/start_up.py --write           # writes benchmarks/results/start_up_PROCESSOR.md

Runs ``gecko train gecko_125m`` as a user would, on one short row, so that the start dominates. Caches are cold: the
folders for compiled kernels are empty, and the operating system is asked to drop the cached files of this Python's
packages, which it does unless another process uses them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import of_processor, parsed, parser_of, publish, table

from gecko.train.metrics import read_metrics
from gecko.train.throughput import describe_hardware, select_device

TARGET = 60
"""Target in seconds."""
PATIENCE = 1_800
"""Seconds after which the process counts as hung."""


def forget_files(folder: Path) -> int:
    """Ask the operating system to drop the cached pages of all files in ``folder``; return their size in bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += path.stat().st_size
    return total


def start(recipe: str, device: str, length: int) -> list[float]:
    """Train a recipe on one row in a separate process, and watch its metrics.

    Return the seconds until packages, data and model are there, a held-out row was evaluated, and a step is done.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, caches = Path(folder) / "run", Path(folder)
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "CUDA_CACHE_PATH": str(caches / "cuda"), "XDG_CACHE_HOME": str(caches / "user"),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "gecko", "train", recipe, f"output={run}", f"device={device}", "steps=1",
            f"sequence_length={length}", "batch_size=1", "gradient_accumulation_steps=1",
            "evaluation.rows=1", "evaluation.final_rows=1",
        ]  # fmt: skip
        begin = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                events = (run / "recipe.json").exists, *(partial(_recorded, run, x) for x in ("validation", "train"))
                return [_when(begin, process, happened) for happened in events]
            finally:
                process.kill()


def _recorded(run: Path, kind: str) -> bool:
    return any(record["kind"] == kind for record in read_metrics(run / "metrics.jsonl"))


def _when(begin: float, process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> float:
    while not happened():
        seconds = time.perf_counter() - begin
        if (process.poll() is not None and not happened()) or seconds > PATIENCE:
            output = process.stdout.read().decode(errors="replace")[-2000:] if process.poll() is not None else ""
            raise RuntimeError(f"training must reach its first step; after {seconds:.0f} s it had not.\n{output}")
        time.sleep(0.02)
    return time.perf_counter() - begin


def main() -> None:
    given = parsed(parser_of(
        __doc__, recipe=("gecko_125m", "its name"), length=(512, "tokens in the row"), device=("auto", "of the run"),
        starts=(3, "one after the other"),
    ))  # fmt: skip
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    rows, forgotten = [], 0
    for number in range(1, given.starts + 1):
        forgotten = forget_files(Path(sysconfig.get_path("purelib")))
        rows.append((number, *start(given.recipe, given.device, given.length)))
        print(*rows[-1], flush=True)
    gpu = describe_hardware(select_device(given.device)).get("GPU", "")
    publish(
        of_processor("start_up"), given, "Start-up", f"GPU: {gpu}." * bool(gpu),
        f"`gecko train {given.recipe}` on one row of {given.length:,} tokens: seconds since the start. Cold caches: no "
        f"compiled kernels, and {forgotten / 1e9:.1f} GB of packages that the operating system was asked to forget "
        f"before each start. Target: the first step ends within {TARGET} s.",
        table(["start|,", "packages, data and model are there|.1f", "a held-out row was read|.1f",
               "the first step is done|.1f"], rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
