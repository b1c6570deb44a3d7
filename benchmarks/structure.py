"""Print the size of the code base, its names, its circles of imports, and the files that a value passes through.

    python benchmarks/structure.py          # sizes, names, parameters, circles
    python benchmarks/structure.py --walk   # also: files on the path of a Run, of a request and of a call's tokens
    python benchmarks/structure.py --sample 3  # docstrings, paragraphs and file names for a fresh reader, by a seed

- **code**: lines that hold code, without docstrings, comments and blank lines.
- **class names used twice**: names of classes, without leading underscores, that occur in more than one place.
- **functions with 8 parameters**: ``self`` and ``cls`` do not count, nor do Triton kernels.
- **circle**: modules that import each other, directly or through others, wherever the import stands. That no import
  runs up is checked by ``lint-imports``.
- **path**: functions that are called with the value itself or with a value derived from it: what it holds, and what a
  function on the path returned or constructed. Tensors, modules, texts and numbers are not derived values. Each
  function counts once, at its first call; a *return* is a move to a file that the path had left.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import random
import re
import statistics
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import grimp
import networkx

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gecko"
Node = TypeVar("Node", bound=ast.AST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", action="store_true", help="trace a training step, a request and a loss")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print a random sample for a fresh reader")
    given = parser.parse_args()
    if given.sample is not None:
        print_sample(given.sample)
        return
    print_sizes()
    if given.walk:
        for title, walk in (
            ("a Run, from gecko train to the end", walk_run()),
            ("a request, from its route to its answer", walk_request()),
            ("tokens, in Gecko.loss", walk_tokens()),
        ):
            files = len(set(walk.stays))
            print(f"\n{title}: {files} files, {len(walk.stays) - files} returns")
            print("\n".join(f"    {file}" for file in walk.stays))


def print_sizes() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    lengths, functions = sorted(map(count_lines, trees)), sorted(function_lengths(trees.values()))
    folders = Counter(path.parent for path in trees)
    fullest, most = folders.most_common(1)[0]
    print(f"src: lines / code / files  {sum(lengths):,} / {sum(map(code_lines, trees)):,} / {len(trees)}")
    for name, values in (("file    ", lengths), ("function", functions)):
        high = values[min(len(values) - 1, int(0.9 * len(values)))]
        print(f"lines per {name}         median {statistics.median(values):.0f}, p90 {high}")
    print(f"files in the largest folder {most} ({fullest.relative_to(ROOT)})")
    classes = Counter(node.name.lstrip("_") for node in nodes(trees.values(), ast.ClassDef))
    twice = sorted(name for name, count in classes.items() if count > 1)
    print(f"classes                    {classes.total()}; names used twice: {len(twice)} ({', '.join(twice)})")
    wide = sorted(wide_functions(trees))
    rooms = ", ".join(f"{room} {count}" for room, count in Counter(room for room, _ in wide).most_common())
    print(f"functions with 8 parameters {len(wide)} ({rooms})")
    found = circles()
    print(f"circles of imports         {len(found)}" + "".join(f"\n    {' <-> '.join(circle)}" for circle in found))
    for name in ("tests", "benchmarks", "benchmarks/gpu"):
        print(f"lines of Python in {name + '/':<16} {sum(map(count_lines, (ROOT / name).rglob('*.py'))):,}")
    print(f"lines of C in src/         {sum(count_lines(path) for path in SOURCE.rglob('*.[ch]')):,}")
    results = [path for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file()]
    print(f"committed results          {sum(path.stat().st_size for path in results) / 1e6:.2f} MB")


def print_sample(seed: int) -> None:
    """Print 30 docstrings, 10 paragraphs of pages and 10 file names, drawn at random."""
    draw = random.Random(seed)
    print(f"seed {seed}")
    for kind, found, count in (("docstring", docstrings(), 30), ("paragraph", paragraphs(), 10)):
        for number, (place, text) in enumerate(draw.sample(sorted(found), count), 1):
            print(f"\n[{kind} {number}] {place}\n{text}")
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


def code_lines(path: Path) -> int:
    """Return the number of lines with code. A text that is a statement of its own is a docstring."""
    text, lines = path.read_text(encoding="utf-8"), set[int]()
    prose = {
        line
        for node in nodes([ast.parse(text)], ast.Expr)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def nodes(trees: Iterable[ast.Module], *kinds: type[Node]) -> Iterator[Node]:
    """Yield the nodes of the given kinds."""
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


def function_lengths(trees: Iterable[ast.Module]) -> Iterator[int]:
    """Yield the number of lines of each function without its docstring."""
    for node in nodes(trees, ast.FunctionDef, ast.AsyncFunctionDef):
        first = node.body[0]
        has_docstring = ast.get_docstring(node) is not None
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
        yield (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def wide_functions(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield the folder and name of each function with at least 8 parameters that is no Triton kernel."""
    for path, tree in trees.items():
        for node in nodes([tree], ast.FunctionDef, ast.AsyncFunctionDef):
            given = node.args
            parameters = *given.posonlyargs, *given.args, *given.kwonlyargs
            names = [x.arg for x in parameters if x.arg not in ("self", "cls")]
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            if len(names) >= 8 and not kernel:
                yield path.relative_to(SOURCE).parts[0], node.name


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other."""
    graph = grimp.build_graph("gecko", cache_dir=None)
    imports = [(name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name)]
    groups = networkx.strongly_connected_components(networkx.DiGraph(imports))
    return sorted(sorted(group) for group in groups if len(group) > 1)


class Walk:
    """Context that records the path of the values that ``follows`` accepts."""

    def __init__(self, follows: Callable[[Any], bool], *, derived: bool = True) -> None:
        self._follows, self._derived = follows, derived
        self._kept: dict[int, Any] = {}  # holding the values keeps their ids theirs
        self._seen: set[CodeType] = set()
        self._on_path: set[FrameType] = set()
        self.stays: list[str] = []

    def __enter__(self) -> Walk:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(SOURCE)):
            return
        if event == "return":
            if frame in self._on_path:
                self._on_path.remove(frame)
                self._keep(frame.f_locals.get("self") if code.co_name == "__init__" else result)
        elif any(self._is_followed(value) for value in arguments(frame)):
            if self._derived:
                self._on_path.add(frame)
            if code not in self._seen:
                self._seen.add(code)
                file = str(Path(code.co_filename).relative_to(SOURCE))
                if self.stays[-1:] != [file]:
                    self.stays.append(file)

    def _is_followed(self, value: Any) -> bool:
        if self._follows(value):
            if self._derived:
                self._keep(value)
            return True
        return id(value) in self._kept

    def _keep(self, value: Any) -> None:
        """Remember a derived value and the records that it holds."""
        import torch

        for one in value if isinstance(value, tuple | list) else [value]:
            ours = type(one).__module__.startswith("gecko.") and not isinstance(one, torch.Tensor | torch.nn.Module)
            if ours and id(one) not in self._kept:
                self._kept[id(one)] = one
                if dataclasses.is_dataclass(one):
                    self._keep([getattr(one, field.name, None) for field in dataclasses.fields(one)])


def arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:count]:
        yield frame.f_locals.get(name)
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        rest = frame.f_locals.get(code.co_varnames[count])
        yield from rest.values() if isinstance(rest, dict) else rest or ()


SMALL = (
    "model.num_layers=1", "model.model_dim=32", "model.key_dim=16", "model.value_dim=32", "model.num_heads=2",
    "model.ffn_dim=32", "model.cema_modes=4", "model.chunk_size=16", "model.timestep_groups=4", "batch_size=1",
    "sequence_length=64", "steps=2", "sample.tokens=0", "evaluation.rows=1", "evaluation.final_rows=1",
)  # fmt: skip


def walk_run() -> Walk:
    """Train two steps with the command line."""
    from typer.testing import CliRunner

    from gecko.cli import app
    from gecko.train import Run

    walk = Walk(lambda value: isinstance(value, Run))
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        texts.mkdir()
        for number in range(4):
            (texts / f"{number}.txt").write_text(f"text {number} " * 100, encoding="utf-8")
        with walk:
            command = ["train", "tiny", *SMALL, f"data.source={texts}", "--out", f"{folder}/run"]
            result = CliRunner().invoke(app, command)
    if result.exit_code:
        raise RuntimeError(f"gecko train must end; it printed {result.output}")
    return walk


def walk_request() -> Walk:
    """Serve one completion through the HTTP routes."""
    import urllib.request

    import gecko
    from gecko.data import ByteTokenizer
    from gecko.inference.request import Request
    from gecko.serving.options import Options
    from gecko.serving.protocol import CompletionRequest
    from gecko.serving.server import Server, build_service, open_socket

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
    with Walk(lambda x: type(x) is torch.Tensor and x.untyped_storage().data_ptr() == storage, derived=False) as walk:
        model.loss(inputs, targets)
    return walk


if __name__ == "__main__":
    main()
