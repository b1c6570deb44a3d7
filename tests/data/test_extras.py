from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gecko.runtime.process import require


def test_module_that_is_there() -> None:
    assert require("json", "data") is json


def test_missing_module_names_the_command() -> None:
    with pytest.raises(ImportError, match=r"'not_a_module\.part'.*pip install 'gecko-lm\[data\]'"):
        require("not_a_module.part", "data")


def test_module_that_lacks_a_dependency_speaks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacks_one.py").write_text("import another_missing_module")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError, match="another_missing_module") as caught:
        require("lacks_one", "data")
    assert "pip install" not in str(caught.value)
