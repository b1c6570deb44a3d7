"""Runs files of ``tests/gpu`` as parts of a measurement: each test is a result as soon as it has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu.timing import Bench

ROOT = Path(__file__).parents[2]
MOST_WORKERS = 12
ENDED_WELL = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, none collected, as on a machine without a card."""


@dataclass(frozen=True)
class Tested:
    """How one test ended."""

    __test__ = False  # for pytest: this class is no test

    file: str
    test: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    seconds: float
    message: str = ""


def run_tests(file: str, bench: Bench) -> Iterator[Tested]:
    """Run a file of ``tests/gpu`` on several workers.

    Raises:
        RuntimeError: pytest did not end as it does after tests.
    """
    workers = str(min(MOST_WORKERS, os.cpu_count() or 1))
    with tempfile.NamedTemporaryFile("r") as lines:
        command = [
            sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", "-p", "gpu.reporting",
            "--report-to", lines.name, "--compilations", str(bench.compilations.path), str(ROOT / "tests/gpu" / file),
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=sys.stderr) as process:
            ended = False
            while not ended:
                ended = process.poll() is not None  # read once more after the end
                yield from (Tested(file, **json.loads(line)) for line in lines)
                time.sleep(0.2)
        if process.returncode not in ENDED_WELL:
            raise RuntimeError(f"pytest must end with one of {ENDED_WELL}; it ended with {process.returncode}.")


def _environment() -> dict[str, str]:
    """Return an environment in which the workers find this package and the plugin."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
