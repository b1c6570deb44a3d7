"""Run every command of the tutorial, as the page has them, in a new environment that has only the wheel.

``make test-tutorial`` runs them at a small size in a few minutes, ``python tests/documents/tutorial.py --full`` as they
are. The commands become one shell script, which stops at the first that fails. Only the clone of the repository is
replaced, by a copy of its files, which is removed when it is installed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from documents.blocks import blocks, commands

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
PACKAGED = ("src", "pyproject.toml", "README.md", "LICENSE")
SMALL = {
    "gecko[all]": "gecko[train,chat,serve,eval]",  # what the commands of the page need
    "topics.values()))": "topics.values())[:60_000])",
    "minutes=10": "steps=12 sequence_length=256 evaluation.rows=4",
    "--epochs 12": "--epochs 1",
}
"""What makes the commands small. Each must occur in the page."""
SERVE = """\
{command} --port {port} & server=$!
trap 'kill $server' EXIT
until curl --fail --silent --output /dev/null localhost:{port}/health; do kill -0 $server; sleep 0.2; done"""


def script(page: Path, port: int, replaced: dict[str, str]) -> str:
    """Return the shell script of a page: its commands, and the files that it says to save."""
    text = "\n".join(("set -euo pipefail", *_steps(page, port))).replace("localhost:8000", f"localhost:{port}")
    for old, new in replaced.items():
        if old not in text:
            raise ValueError(f"{page.name} must contain {old!r}, which the small size replaces; it does not.")
        text = text.replace(old, new)
    return text


def _steps(page: Path, port: int) -> Iterator[str]:
    for block in blocks(page):
        if block.title is not None:
            yield f"cat > {block.title} <<'END OF FILE'\n{block.text}END OF FILE\n"
        for command in commands(block):
            yield f"echo; echo {shlex.quote('$ ' + command.text)}"
            yield _runnable(command.text, port)


def _runnable(command: str, port: int) -> str:
    if command.startswith("git clone REPOSITORY"):
        return f"mkdir gecko && cp -r {' '.join(shlex.quote(str(ROOT / name)) for name in PACKAGED)} gecko"
    if command.startswith("pip install './gecko"):
        return f"{command} && rm -r gecko"
    return SERVE.format(command=command, port=port) if command.startswith("gecko serve") else command


def free_port() -> int:
    """Return the number of a port that no program uses."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _environment() -> dict[str, str]:
    """Return the variables of a newcomer, and the versions of constraints.txt for pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    python = str(Path(sys._base_executable).parent)  # type: ignore[attr-defined]  # python3 is not that of .venv
    return kept | {
        "PATH": f"{python}:{kept['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_QUIET": "1",
        "PIP_NO_COMPILE": "1",  # modules are compiled when they are imported
    }


def main() -> int:
    """Run the page; return the exit code of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="run the commands at the size of the page")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run in this new folder and keep it")
    options = parser.parse_args()
    text = script(PAGE, free_port(), {} if options.full else SMALL)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="tutorial-"))
    folder.mkdir(exist_ok=True)
    try:
        return subprocess.run(["bash", "-c", text], cwd=folder, env=_environment(), check=False).returncode
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
