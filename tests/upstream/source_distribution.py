"""Imports test modules from transformers' source distribution, which ``make test-upstream`` unpacks."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

TESTS = Path(__file__).parents[2] / "build/upstream/tests"
PACKAGE = "transformers_tests"

LEFT_OUT = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
"""Modules that test modules import and that a source distribution may lack, with replacements that contain no tests."""


def upstream(module: str) -> types.ModuleType:
    """Import a module of upstream's tests; FileNotFoundError if the source distribution is not unpacked."""
    if not TESTS.is_dir():
        raise FileNotFoundError(f"{TESTS} must hold upstream's tests; run make test-upstream, which downloads them.")
    if PACKAGE not in sys.modules:
        missing = {x: of for x, of in LEFT_OUT.items() if not (TESTS / f"{x.replace('.', '/')}.py").exists()}
        # Packages without ``__init__``; upstream imports ``tests`` from the folder that contains it.
        for folder in ("", *{f".{name.split('.')[0]}" for name in missing}):
            package = sys.modules[PACKAGE + folder] = types.ModuleType(PACKAGE + folder)
            package.__path__ = [str(TESTS / folder[1:])]
        for name, contents in missing.items():
            stand_in = sys.modules[f"{PACKAGE}.{name}"] = types.ModuleType(f"{PACKAGE}.{name}")
            vars(stand_in).update(contents)
    return importlib.import_module(f"{PACKAGE}.{module}")
