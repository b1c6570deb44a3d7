"""Seconds from the start of a process to the end of its first training step, with cold caches.

    python benchmarks/start_up.py --write           # writes benchmarks/results/start_up_PROCESSOR.md

Runs ``gecko train gecko_125m`` as a user would, on one short row, so that the start dominates. Caches are cold: the
folders for compiled kernels are empty, and the operating system is asked to drop the cached files of this Python's
packages, which it does unless another process uses them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import load, of_processor, parser_of, publish

from gecko.train.metrics import read_metrics
from gecko.train.throughput import describe_hardware, select_device

TARGET = 60
"""Target in seconds."""
PATIENCE = 1_800
"""Seconds after which the process counts as hung."""


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process to each event."""

    built: float
    """Packages are imported, documents read, model and optimizer created."""
    evaluated: float
    """The held-out row is evaluated, before the first step."""
    stepped: float


def forget_files(folder: Path) -> int:
    """Ask the operating system to drop the cached pages of all files in ``folder``; return their size in bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += path.stat().st_size
    return total


def start(recipe: str, device: str, length: int) -> Start:
    """Train a recipe on one row in a separate process, and watch its metrics."""
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
                built = _when(begin, process, lambda: (run / "recipe.json").exists())
                evaluated = _when(begin, process, lambda: _recorded(run, "validation"))
                stepped = _when(begin, process, lambda: _recorded(run, "train"))
            finally:
                process.kill()
        return Start(built, evaluated, stepped)


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


def page(results: list[Start], forgotten: int, arguments: argparse.Namespace) -> list[str]:
    """Return the results in Markdown."""
    hardware = "; ".join(describe_hardware(select_device(arguments.device)).values())
    return [
        "# Start-up", "", f"{hardware}. {load()}", "",
        f"`gecko train {arguments.recipe}` on one row of {arguments.length:,} tokens: seconds since the start. "
        f"Cold caches: no compiled kernels, and {forgotten / 1e9:.1f} GB of packages that the operating system was "
        f"asked to forget before each start. Target: the first step ends within {TARGET} s.", "",
        "| start | packages, data and model are there | a held-out row was read | the first step is done |",
        "|---:|---:|---:|---:|",
        *(f"| {number} | {result.built:.1f} | {result.evaluated:.1f} | {result.stepped:.1f} |"
          for number, result in enumerate(results, start=1)), "",
        f"Written by `python benchmarks/start_up.py --recipe {arguments.recipe} --length {arguments.length} --write`.",
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="gecko_125m")
    parser.add_argument("--length", type=int, default=512, help="tokens in the row")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    results, forgotten = [], 0
    for _ in range(arguments.starts):
        forgotten = forget_files(Path(sysconfig.get_path("purelib")))
        results.append(start(arguments.recipe, arguments.device, arguments.length))
        print(results[-1], flush=True)
    publish(of_processor("start_up"), page(results, forgotten, arguments), arguments.write)


if __name__ == "__main__":
    main()
