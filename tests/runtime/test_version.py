"""The commit of the version is that of a checkout that tracks the file; otherwise there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gecko.runtime.process import __version__, code_name, code_version, git_commit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "tracked.py").write_text("1")
    for arguments in (("init", "-q"), ("add", "tracked.py"), ("commit", "-q", "-m", "one")):
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True)
    return tmp_path


def test_commit_of_a_tracked_file(checkout: Path) -> None:
    commit = git_commit(checkout / "tracked.py")
    assert commit is not None and len(commit) == 40
    (checkout / "tracked.py").write_text("2")
    assert git_commit(checkout / "tracked.py") == f"{commit}-dirty"


def test_a_copy_inside_another_checkout_has_none(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (checkout / "installed.py").write_text("1")
    assert git_commit(checkout / "installed.py") is None
    assert git_commit(tmp_path_factory.mktemp("elsewhere") / "no.py") is None


def test_names() -> None:
    assert code_version()["version"] == __version__
    assert code_name({"version": "1.2", "commit": None}) == "1.2, not from a checkout"
    assert code_name({"version": "1.2", "commit": "abc"}) == "1.2, commit abc"
