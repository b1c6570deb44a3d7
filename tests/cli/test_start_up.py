"""Help and version do not import PyTorch, imports are lazy, and text does not wait for modules of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.native_agreement import needs_compiler

import gecko

HEAVY = ("torch", "numpy", "safetensors", "gecko.config", "gecko.train")
UNUSED = ("torch._dynamo", "torch.distributed.fsdp", "sympy", "transformers", "matplotlib")
"""Modules of training and compiling, which take longer to import than PyTorch itself."""


def _loaded(program: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    """Return which of ``modules`` a fresh process has imported after ``program``."""
    report = f"import json, sys; print(); print(json.dumps([name for name in {modules!r} if name in sys.modules]))"
    program = f"try:\n    {program}\nexcept SystemExit:\n    pass\n{report}"
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["eval", "retrieval", "--help"], ["state", "--help"]])
def test_help_and_version_do_not_import_pytorch(arguments: list[str]) -> None:
    assert _loaded(f"from gecko.cli import app; app({arguments!r})") == []


def test_the_package_imports_pytorch_on_first_use() -> None:
    assert _loaded("import gecko; assert set(gecko.__all__) <= set(dir(gecko))") == []
    assert "torch" in _loaded("import gecko; gecko.Gecko")
    with pytest.raises(AttributeError, match="'gecko' has no attribute 'nothing'"):
        _ = gecko.nothing  # type: ignore[attr-defined]


def test_text_does_not_wait_for_modules_of_training() -> None:
    arguments = ["generate", "books", "--prompt", "It was ", "-n", "20"]
    assert _loaded(f"from gecko.cli import app; app({arguments!r})", UNUSED) == []


@needs_compiler
def test_a_short_prompt_needs_the_small_library_only(tmp_path: Path) -> None:
    """The other one takes twice as long to compile, so the first text would come later."""
    arguments = ["generate", "books", "--prompt", "It was ", "-n", "20", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "gecko", *arguments], env=environment, capture_output=True, check=True)
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.so")] == ["decoding"]


def test_a_shell_completes_commands_without_pytorch() -> None:
    """The shell asks for completions by environment variables."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(gecko.__file__).parents[1]), "_GECKO_COMPLETE": "complete_bash",
        "COMP_WORDS": "gecko ch", "COMP_CWORD": "1",
    }  # fmt: skip
    program = "import sys\nfrom gecko.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["chat"]
