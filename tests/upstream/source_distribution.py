"""Imports test modules from transformers' source distribution, which ``make test-upstream`` unpacks."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import transformers

TESTS = Path(transformers.__file__).parents[1] / "tests"
PACKAGE = "transformers_tests"

LEFT_OUT = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
"""Modules that test modules import and that a source distribution may lack, with replacements that contain no tests."""


def upstream(module: str) -> types.ModuleType:
    """Import a module of upstream's tests.

    Raises:
        FileNotFoundError: the source distribution is not unpacked.
    """
    if not TESTS.is_dir():
        raise FileNotFoundError(f"{TESTS} must hold upstream's tests; run make test-upstream, which downloads them.")
    if PACKAGE not in sys.modules:
        _package(PACKAGE, TESTS)
        for name, contents in LEFT_OUT.items():
            if not (TESTS / f"{name.replace('.', '/')}.py").exists():
                _stand_in(name, contents)
    return importlib.import_module(f"{PACKAGE}.{module}")


def _package(name: str, folder: Path) -> None:
    """Register a package without ``__init__``; upstream imports ``tests`` from the folder that contains it."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(folder)]


def _stand_in(name: str, contents: dict[str, object]) -> None:
    folder = name.split(".")[0]
    if f"{PACKAGE}.{folder}" not in sys.modules:
        _package(f"{PACKAGE}.{folder}", TESTS / folder)
    module = sys.modules[f"{PACKAGE}.{name}"] = types.ModuleType(f"{PACKAGE}.{name}")
    vars(module).update(contents)
