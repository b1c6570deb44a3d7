"""The wheel and the sdist: equal bytes from equal files, and all files of the package."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="a copy of the code without its documents")
BUILD = "import os, sys; os.umask(int(sys.argv[2], 8)); from hatchling import build; " \
        "build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"  # fmt: skip


def checkout(folder: Path, mode: int, seconds: int) -> Path:
    """Copy what a build reads, with other modes and times."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for path in folder.rglob("*"):
        path.chmod(mode | (0o111 if path.is_dir() else 0))
        os.utime(path, (seconds, seconds))
    return folder


def built(folder: Path, mask: str, epoch: str) -> dict[str, Path]:
    """Return the files that a build of a folder writes, by suffix."""
    out = folder / "dist"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    subprocess.run([sys.executable, "-c", BUILD, str(out), mask], cwd=folder, env=environment, check=True)
    return {path.suffix: path for path in out.iterdir()}


def sha256(files: dict[str, Path]) -> dict[str, str]:
    return {suffix: hashlib.sha256(path.read_bytes()).hexdigest() for suffix, path in files.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return built(checkout(tmp_path_factory.mktemp("one") / "gecko", 0o644, 10**9), "022", "1700000000")


def test_builds_of_equal_files_are_equal_bytes(files: dict[str, Path], tmp_path: Path) -> None:
    """In another folder, with another umask, other modes and other times; and the wheel of the unpacked sdist."""
    other = built(checkout(tmp_path / "another place", 0o600, 11 * 10**8), "077", "1700000000")
    assert sha256(files) == sha256(other) and set(files) == {".whl", ".gz"}
    with tarfile.open(other[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("gecko_lm-*")
    assert sha256(built(unpacked, "022", "1700000000"))[".whl"] == sha256(files)[".whl"]


def test_the_wheel_holds_every_file_of_the_package(files: dict[str, Path]) -> None:
    with zipfile.ZipFile(files[".whl"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (entries,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert {info.date_time[0] for info in wheel.infolist()} == {2023}, "the time of SOURCE_DATE_EPOCH"
    package = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "gecko").rglob("*") if path.is_file()}
    assert names == {path.as_posix() for path in package if "__pycache__" not in path.parts}
    assert {Path(name).suffix for name in names} == {
        ".py", ".c", ".h", ".j2", ".html", ".json", ".typed", ".md", ".safetensors",
    }  # fmt: skip
    assert "gecko = gecko.cli:main" in entries and "gecko = gecko.vllm:register" in entries
    with tarfile.open(files[".gz"]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside == {f"src/{name}" for name in names} | {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
