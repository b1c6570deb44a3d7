"""Rules for the source of kernels that the compiler does not enforce."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted([*(ROOT / "src/gecko/ops").glob("*/triton*.py"), *(ROOT / "benchmarks/gpu").glob("*kernel*.py")])


def _kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_return_at_their_end_only(path):
    """After a return inside ``if CONSTEXPR:`` Triton compiles the rest of the function as well."""
    for kernel in _kernels(ast.parse(path.read_text())):
        inner = [x for x in ast.walk(kernel) if isinstance(x, ast.Return) and x is not kernel.body[-1]]
        assert not inner, f"{kernel.name} returns in line {inner[0].lineno}"
