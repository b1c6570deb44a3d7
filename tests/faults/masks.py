"""Remove each mask and each barrier of the Triton kernels alone, and expect the tests of its operator to fail.

Run ``make masks``, or ``PYTHONPATH=tests python tests/faults/masks.py WORD ...`` for the files whose paths contain one
of the words. The tests run under the simulator, in a copy of the repository. All files take about an hour; verdicts are
kept in ``build/masks.json``, so that the next run goes on with the others. ``masks.toml`` lists the guards whose
removal no test can notice, with the reason.
"""

import argparse
import ast
import hashlib
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.plant import FAILED, PASSED, ROOT, copy_repository, run_tests

OPERATORS = Path("src/gecko/ops")
TESTS = {
    "cema": "test_cema", "chunk_attention": "test_chunk_attention", "decoding": "test_decoding",
    "feed_forward": "test_gates", "gates": "test_gates", "loss": "test_loss", "norms": "test_norms",
    "qk_scale_shift": "test_gates", "timestep_norm": "test_timestep_norm",
    "working_memory": "test_working_memory",
}  # fmt: skip
"""Name of the test file by the folder of the operator."""
BARRIERS = ("tests/kernels/compiled/test_barriers.py",)
"""No simulator runs the warps of a program side by side, so a test of the compiled code notices a missing barrier."""
SELECTED = ("-k", "not (split_anywhere or packed_is_alone or any_strides)")
"""A removed guard fails in the comparison with the reference, or nowhere."""
NO_BARRIER = "None"
VERDICTS = ROOT / "build" / "masks.json"


@dataclass(frozen=True)
class Guard:
    """A mask of a load or store, or a barrier."""

    file: str
    line: int
    call: str
    """Source of the call, in one line."""
    begin: int
    """First byte of the code to replace in the file; ``end``: the byte after it."""
    end: int
    new: str

    def removed_from(self, content: bytes) -> bytes:
        return content[: self.begin] + self.new.encode() + content[self.end :]

    @property
    def tests(self) -> tuple[str, ...]:
        if self.new == NO_BARRIER:
            return BARRIERS
        name = TESTS[Path(self.file).relative_to(OPERATORS).parts[0]]
        return (f"tests/kernels/interpreted/{name}.py", *SELECTED)


def kernel_files() -> list[str]:
    """Return the paths of all files with Triton kernels of an operator."""
    found = (ROOT / OPERATORS).glob("*/triton*.py")
    return sorted(str(path.relative_to(ROOT)) for path in found if list(guards_of(str(path.relative_to(ROOT)))))


def guards_of(file: str, root: Path = ROOT) -> Iterator[Guard]:
    """Yield the guards of a file of the repository at ``root``, in their order."""
    content = (root / file).read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    calls = (node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Call))
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if not isinstance(node.func, ast.Attribute):
            continue
        call = " ".join(ast.unparse(node).split())
        if node.func.attr == "debug_barrier":
            yield Guard(file, node.lineno, call, *_span(node, place), NO_BARRIER)
        elif node.func.attr in ("load", "store") or node.func.attr.startswith("atomic_"):
            for keyword in node.keywords:
                if keyword.arg == "mask":
                    span = _span(keyword.value, place)
                    yield Guard(file, node.lineno, call, *span, f"({content[slice(*span)].decode()}) | True")


def _span(node: ast.expr, place: Callable[[int, int], int]) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


def known_reasons() -> dict[tuple[str, str], str]:
    """Return the reasons of ``masks.toml`` by file and call."""
    table = tomllib.loads((Path(__file__).parent / "masks.toml").read_text(encoding="utf-8"))
    return {(one["file"], one["call"]): one["reason"] for one in table["unnoticed"]}


def verdict_of(folder: Path, guard: Guard) -> str:
    """Return ``noticed``, ``not noticed`` or ``does not run``, with the guard removed in the copy at ``folder``."""
    path = folder / guard.file
    original = path.read_bytes()
    path.write_bytes(guard.removed_from(original))
    try:
        code, text = run_tests(folder, guard.tests)
    finally:
        path.write_bytes(original)
    if code not in (PASSED, FAILED) or "CompilationError" in text:
        return "does not run"
    return "not noticed" if code == PASSED else "noticed"


def main() -> int:
    """Print one line per guard; return 0 if each is noticed or listed in ``masks.toml``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words in the paths of files; all files by default")
    words = parser.parse_args().words
    files = [file for file in kernel_files() if not words or any(word in file for word in words)]
    if not files:
        parser.error(f"words must be part of the path of a file with kernels; got {' '.join(words)}.")
    there = {(guard.file, guard.call) for file in files for guard in guards_of(file)}
    for file, call in known_reasons().keys() - there:
        if file in files:
            print(f"{'OUTDATED':16} {file} {call} in masks.toml")
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8")) if VERDICTS.exists() else {}
    reasons, wrong, total = known_reasons(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        copy_repository(Path(temporary))
        # The repository may change meanwhile, the copy does not.
        for guard in (guard for file in files for guard in guards_of(file, Path(temporary))):
            begin = time.perf_counter()
            removed = guard.removed_from((Path(temporary) / guard.file).read_bytes())
            key = hashlib.sha256(removed).hexdigest()
            if key not in verdicts:
                verdicts[key] = verdict_of(Path(temporary), guard)
                VERDICTS.parent.mkdir(exist_ok=True)
                VERDICTS.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
            reason = reasons.get((guard.file, guard.call))
            total, wrong = total + 1, wrong + (verdicts[key] != "noticed" and reason is None)
            seconds = time.perf_counter() - begin
            print(f"{verdicts[key]:16} {guard.file}:{guard.line} {guard.call} ({seconds:.0f} s)", flush=True)
            if reason is not None:
                print(f"{'':16} known: {reason}", flush=True)
    print(f"{total - wrong} of {total} guards are noticed or listed in masks.toml")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
