"""Plant each fault of ``faults.toml`` alone in a copy of the repository and expect its tests to fail.

Run ``make faults``, or ``python tests/faults/plant.py NAME ...`` for the faults whose names contain one of the words.
Faults are exact replacements of code and not patches: they name no line numbers and need no context lines, so an edit
elsewhere in the file does not break them. The code to replace must occur exactly once in its file; a fault whose code
or tests are no longer there is reported and not planted. ``--check`` only prints these and their number.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
MINUTES = 10
"""Time limit in minutes for the tests of one fault."""
SIMULATED = ("-p", "kernels.simulated")
"""Arguments of tests that run kernels: under the simulator, which notices accesses outside of a tensor. The environment
must have it (``make .venv/simulated``)."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest. Any other code, such as that of an error during collection, is not a failed test."""
CRASHED = tuple(-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE))
"""Exit codes of a process that a fault in C has ended, which counts as a failed test."""


@dataclass(frozen=True)
class Fault:
    """A change to the code that its tests must notice."""

    name: str
    file: str
    """Path of the changed file in the repository."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest."""

    def outdated(self) -> str | None:
        """Return why the fault no longer applies to the repository; None if it does."""
        path = ROOT / self.file
        if (found := path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0) != 1:
            return f"its code occurs {found} times in {self.file}"
        for test in self.tests:
            file, *names = test.split("::")
            content = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
            if not content or not all(f"def {name}(" in content for name in names):
                return f"there is no test {test}"
        return None


def copy_repository(folder: Path) -> None:
    """Copy what the tests need to ``folder``."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run pytest on the copy at ``folder``; return its exit code, or ``FAILED`` if it crashes or takes too long, and
    what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{folder}/tests", "XDG_CACHE_HOME": f"{folder}/cache"}
    given = (*SIMULATED, *tests) if any("kernels/interpreted" in test for test in tests) else tests
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *given]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * MINUTES, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, ""
    if done.returncode in CRASHED:
        return FAILED, done.stdout
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode, done.stdout


def is_found(folder: Path, fault: Fault) -> bool:
    """Return whether the tests of ``fault`` fail while it is planted in the copy at ``folder``."""
    path = folder / fault.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return run_tests(folder, fault.tests)[0] == FAILED
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> int:
    """Print one line per fault; return 0 if the tests pass without faults and fail with each that still applies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words in the names of the faults to plant; all faults by default")
    parser.add_argument("--check", action="store_true", help="only print the faults that no longer apply")
    given = parser.parse_args()
    words, table = given.names, tomllib.loads((Path(__file__).parent / "faults.toml").read_text(encoding="utf-8"))
    faults = (Fault(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in table.items())
    chosen = [fault for fault in faults if not words or any(word in fault.name for word in words)]
    if not chosen:
        parser.error(f"names must be part of a fault's name; got {' '.join(words)}.")
    outdated = {fault.name: reason for fault in chosen if (reason := fault.outdated()) is not None}
    for name, reason in outdated.items():
        print(f"OUTDATED   {name}: {reason}")
    told = f"{len(outdated)} of {len(chosen)} faults no longer apply; adapt them in tests/faults/faults.toml"
    print(told, flush=True)
    if given.check:
        return 0
    missed, chosen = [], [fault for fault in chosen if fault.name not in outdated]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_repository(folder)
        sound: dict[tuple[str, ...], bool] = {}
        for fault in chosen:
            begin = time.perf_counter()
            if fault.tests not in sound:
                sound[fault.tests] = run_tests(folder, fault.tests)[0] == PASSED
            found = sound[fault.tests] and is_found(folder, fault)
            verdict = "found" if found else "NOT FOUND" if sound[fault.tests] else "TESTS FAIL WITHOUT IT"
            print(f"{verdict:10} {fault.name} ({time.perf_counter() - begin:.0f} s)", flush=True)
            missed += [] if found else [fault.name]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
