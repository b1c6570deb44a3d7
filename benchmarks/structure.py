"""Print the size of the code base and the number of files that a value passes through.

    python benchmarks/structure.py          # files, lines and functions
    python benchmarks/structure.py --walk   # also: files that a Run, a request and a call's tokens pass through
    python benchmarks/structure.py --sample 3  # docstrings, paragraphs and file names for a fresh reader, by a seed

A value passes through a file when a function of that file is called with the value as an argument. ``--walk`` trains
one step, serves one request and computes one loss, and traces the calls.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gecko"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="trace a training step, a request and a loss")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print a random sample for a fresh reader")
    arguments = parser.parse_args()
    if arguments.sample is not None:
        print_sample(arguments.sample)
        return
    print_sizes()
    if arguments.walk:
        print_walks()


def print_sizes() -> None:
    files = {path: count_lines(path) for path in SOURCE.rglob("*.py")}
    lengths, functions = sorted(files.values()), sorted(function_lengths(files))
    folders = Counter(path.parent for path in files)
    fullest, most = folders.most_common(1)[0]
    print(f"files in src/              {len(files)}")
    print(f"lines per file             median {statistics.median(lengths):.0f}, p90 {percentile(lengths, 0.9)}")
    print(f"lines per function         median {statistics.median(functions):.0f}, p90 {percentile(functions, 0.9)}")
    print(f"modules in the root        {folders[SOURCE]}")
    print(f"files in the largest folder {most} ({fullest.relative_to(ROOT)})")
    for name in ("src", "tests", "benchmarks"):
        print(f"lines of Python in {name + '/':<11} {sum(map(count_lines, (ROOT / name).rglob('*.py'))):,}")
    print(f"lines of C in src/         {sum(count_lines(path) for path in SOURCE.rglob('*.[ch]')):,}")


def print_sample(seed: int) -> None:
    """Print 20 docstrings, 10 paragraphs of pages and 10 file names, drawn at random."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    for number, (place, text) in enumerate(draw.sample(sorted(docstrings()), 20), 1):
        print(f"\n[docstring {number}] {place}\n{text}")
    for number, (place, text) in enumerate(draw.sample(sorted(paragraphs()), 10), 1):
        print(f"\n[paragraph {number}] {place}\n{text}")
    names = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    print("\n[file names] " + ", ".join(draw.sample(names, 10)))


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield docstrings of modules, classes and functions, with the signature of what they describe."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                name = "" if isinstance(node, ast.Module) else f": {node.name}"
                signature = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                yield f"{path.relative_to(SOURCE)}{name}{signature}", text


def paragraphs() -> Iterator[tuple[str, str]]:
    """Yield paragraphs of prose of at least 15 words in README and docs."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8"))
        for text in prose.split("\n\n"):
            if text[:1].isalpha() and len(text.split()) >= 15:
                yield path.name, text.strip()


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def function_lengths(files: dict[Path, int]) -> Iterator[int]:
    """Yield the number of lines of each function without its docstring."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                has_docstring = ast.get_docstring(node) is not None
                docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
                yield (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def percentile(values: list[int], share: float) -> int:
    return values[min(len(values) - 1, int(share * len(values)))]


class Walk:
    """Context that records the files whose functions are called with a value that ``follows`` accepts."""

    def __init__(self, follows: Callable[[Any], bool], until: str = "") -> None:
        self._follows, self._until = follows, until
        self.files: list[str] = []
        self._done = False

    def __enter__(self) -> Walk:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or self._done or not code.co_filename.startswith(str(SOURCE)):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(self._follows(frame.f_locals.get(name)) for name in names):
            file = str(Path(code.co_filename).relative_to(SOURCE))
            if file not in self.files:
                self.files.append(file)
        self._done = bool(self._until) and code.co_name == self._until


def print_walks() -> None:
    for title, walk in (
        ("a Run, from gecko train to the optimizer step", walk_run()),
        ("a request, from its route to a token", walk_request()),
        ("tokens, in Gecko.loss", walk_tokens()),
    ):
        print(f"\n{title}: {len(walk.files)} files")
        print("\n".join(f"    {file}" for file in walk.files))


SMALL = (
    "model.num_layers=1", "model.model_dim=32", "model.key_dim=16", "model.value_dim=32", "model.num_heads=2",
    "model.ffn_dim=32", "model.cema_modes=4", "model.chunk_size=16", "model.timestep_groups=4", "batch_size=1",
    "sequence_length=64", "steps=1", "sample.tokens=0", "evaluation.rows=1", "evaluation.final_rows=1",
)  # fmt: skip


def walk_run() -> Walk:
    """Train one step with the command line."""
    import torch
    from typer.testing import CliRunner

    from gecko.cli import app
    from gecko.train import Run

    walk = Walk(lambda value: isinstance(value, Run))
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        for number in range(4):
            (texts / f"{number}.txt").write_text(f"text {number} " * 100, encoding="utf-8")
        step = torch.optim.AdamW.step

        def stop(*arguments: Any, **options: Any) -> Any:
            walk._done = True
            return step(*arguments, **options)

        torch.optim.AdamW.step = stop  # type: ignore[assignment,method-assign]
        try:
            with walk:
                command = ["train", "tiny", *SMALL, f"data.source={texts}", "--out", f"{folder}/run"]
                result = CliRunner().invoke(app, command)
        finally:
            torch.optim.AdamW.step = step  # type: ignore[method-assign]
    if result.exit_code or not walk._done:
        raise RuntimeError(f"gecko train must reach an optimizer step; it printed {result.output}")
    return walk


def walk_request() -> Walk:
    """Serve one completion through the HTTP routes."""
    import urllib.request

    import gecko
    from gecko.data import ByteTokenizer
    from gecko.inference.request import Request
    from gecko.serving.protocol import CompletionRequest
    from gecko.serving.server import Options, Server, build_service, open_socket

    walk = Walk(lambda value: isinstance(value, CompletionRequest | Request))
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))
    options = Options(name="tiny", grace_seconds=1)
    with tempfile.TemporaryDirectory() as folder, open_socket("127.0.0.1", 0) as listening, walk:
        server = Server(build_service(model, ByteTokenizer(), Path(folder), options), options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        body, headers = b'{"prompt": "abc", "max_tokens": 1}', {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read()
        server.should_exit = True
        thread.join(timeout=30)
    return walk


def walk_tokens() -> Walk:
    """Compute one training loss."""
    import torch

    import gecko

    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1))
    tokens = torch.randint(256, (1, 65))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    storage = inputs.untyped_storage().data_ptr()
    with Walk(lambda value: type(value) is torch.Tensor and value.untyped_storage().data_ptr() == storage) as walk:
        model.loss(inputs, targets)
    return walk


if __name__ == "__main__":
    main()
