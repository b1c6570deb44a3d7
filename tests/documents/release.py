"""Rehearse a release: what must hold before a version is published, each as a line of a list.

``make release-check`` runs it. With ``--pythons`` it installs the wheel on every Python from 3.11 on that is at hand;
``--final`` also demands a day in the changelog. The installations take what pip finds: pass ``PIP_CONSTRAINT`` or
``PIP_EXTRA_INDEX_URL`` to choose versions or PyTorch's build for CPUs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def run(*command: str | Path, **options: object) -> str:
    """Run a command and return what it prints; RuntimeError with its output if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def build(folder: Path) -> Path:
    """Build wheel and sdist twice, compare them, and return the wheel."""
    built = []
    for place in (folder / "first", folder / "second"):
        hatch = (sys.executable, "-m", "hatchling", "build", "-d", place)
        run(*hatch, cwd=ROOT, env=os.environ | {"SOURCE_DATE_EPOCH": "0"})
        built.append({path.name: path.read_bytes() for path in sorted(place.iterdir())})
    if built[0] != built[1] or len(built[0]) != 2:
        raise RuntimeError(f"two builds must give a wheel and an sdist, equal in bytes; got {[*built[0], *built[1]]}")
    return next((folder / "first").glob("*.whl"))


def check_metadata(wheel: Path) -> None:
    """Check the metadata as the package index does."""
    from packaging.metadata import Metadata

    with ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(content.read(name), validate=True)
        if not metadata.description or "gecko/py.typed" not in content.namelist():
            raise RuntimeError("the wheel must hold a description and gecko/py.typed")


def check_changelog(*, final: bool) -> None:
    """The first version in the changelog is the package's; a final release has a day."""
    version = re.search(r'__version__ = "(.*?)"', (ROOT / "src/gecko/runtime/process.py").read_text(encoding="utf-8"))
    heading = re.search(r"^## (\S+) \((.*?)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None and heading is not None
    if heading[1] != version[1] or (final and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2])):
        raise RuntimeError(f"the changelog must begin with {version[1]} and its day; got {heading[0]!r}")


def check_installed(python: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel alone and with its dependencies, which must agree, and write a text with the shipped model."""
    run(python, "-m", "venv", folder)
    new = folder / "bin" / "python"
    run(new, "-m", "pip", "install", "--quiet", wheel)
    run(new, "-m", "pip", "check")
    text = run(new, "-m", "gecko", "generate", "books", "--prompt", "It was ", "-n", "20", "--seed", "1", cwd=folder)
    if len(text) < 20:
        raise RuntimeError(f"gecko generate must print a text; got {text!r}")


def check_container(name: str, folder: Path) -> None:
    """Run the installation of a Dockerfile in a new environment, from the files that it copies."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            *sources, target = line.removeprefix("COPY ").split()
            for source in sources:
                into = folder / target.strip("/")
                into.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, into, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, into)
    run(sys.executable, "-m", "venv", folder / "environment")
    new = folder / "environment" / "bin" / "python"
    for line in lines:
        if line.startswith("RUN pip install "):
            command = line.removeprefix("RUN pip ").replace("/gecko[", f"{folder}/gecko[")
            run("bash", "-c", f"{new} -m pip --quiet {command}")
    run(new, "-m", "gecko", "--help", cwd=folder)
    run(new, "-m", "pip", "check")


def check_notebook() -> None:
    """Run the cells of the notebook in one process, from top to bottom."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-c", program, cwd=folder)


def pythons() -> Iterator[Path]:
    """Yield the Pythons from 3.11 on, one of each version, that are on the path or beside this one."""
    beside = Path(sys.base_prefix).parent
    for minor in range(11, 20):
        at_hand = [*sorted(beside.glob(f"3.{minor}.*/bin/python3")), shutil.which(f"python3.{minor}")]
        for python in filter(None, at_hand):
            has_venv = subprocess.run([str(python), "-c", "import ssl, venv"], capture_output=True, check=False)
            if has_venv.returncode == 0:
                yield Path(python)
                break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--final", action="store_true", help="demand a day in the changelog")
    parser.add_argument("--pythons", action="store_true", help="install on every Python at hand, not on this one alone")
    parser.add_argument("--containers", action="store_true", help="run the installations of the Dockerfiles")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        wheel = build(folder)
        print("wheel and sdist are built twice with equal bytes: ok")
        checks: dict[str, Callable[[], None]] = {
            "metadata": partial(check_metadata, wheel),
            "changelog": partial(check_changelog, final=options.final),
            "notebook": check_notebook,
        }
        versions = {path.resolve().parents[1].name: path for path in pythons()} if options.pythons else {}
        for version, python in (versions or {"this Python": Path(sys.executable)}).items():
            target = folder / f"installed-{version.replace(' ', '-')}"
            checks[f"installed on {version}"] = partial(check_installed, python, wheel, target)
        for dockerfile in DOCKERFILES if options.containers else ():
            checks[dockerfile] = partial(check_container, dockerfile, folder / dockerfile)
        for title, check in checks.items():
            try:
                check()
                print(f"{title}: ok", flush=True)
            except RuntimeError as error:
                failed.append(title)
                print(f"{title}: failed\n{error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
