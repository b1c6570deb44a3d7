"""The first hour of a newcomer: every command of the tutorial and README, in a new environment that has only the wheel.

``make test-first-hour`` runs them at a small size, ``python tests/documents/first_hour.py --full`` as the pages are.
Each command runs on a terminal. The table at the end says how long it took, when its first output came, and how long it
showed nothing at most. The run fails if a command fails, if the form of an output is not that of the page, or if a
command that has run before on this machine shows nothing for longer than ``--silence`` seconds. The clone of the
repository is a copy of its files, which is removed when it is installed; what ``pages.toml`` does not run of README is
not run.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from documents.forms import differences, lines_of
from documents.plan import ROOT, Step, settings, steps
from documents.terminal import Screen, run_on_terminal

PAGES = (ROOT / "docs" / "tutorial.md", ROOT / "README.md")
PACKAGED = ("src", "pyproject.toml", "README.md", "LICENSE")
INSTALLS = ("git clone", "python3 -m venv", "source", "pip install")
NOT_OURS = (*INSTALLS, "import ", "state = ")
"""Beginnings of what may be silent: installations, and Python in which the reader prints."""
SMALL = {
    r"topics\.values\(\)\)\)": "topics.values())[:60_000])",
    r"^gecko (train|compare) (.*)": f"gecko \\1 \\2 data.source=book.txt {settings()['small']}",
    r"^gecko finetune (.*)": "gecko finetune \\1 steps=4 evaluation.rows=2 sample.tokens=4",
    r" minutes=\d+| --epochs \d+|sequence_length=512 ": " ",
    r"--seeds 0,1,2": "--seeds 0",
    r"^make demo": f"gecko train tiny {settings()['small']} --out runs/demo",
}
"""What makes the commands small, in this order."""
TEXT = re.compile(r"\bgecko (?:generate|chat)\b|\bcurl |ask\.py")
"""Commands whose output is text of the model; only what is said about it is compared."""
ABOUT = re.compile(r"^(?:read|wrote|ended by|position) ")
SHELL = """\
. {state} 2>/dev/null; cd "$(cat {state}.folder)"
{command}
code=$?; export -p > {state}; pwd > {state}.folder; exit $code"""


@dataclass
class Hour:
    """A newcomer's shell: variables and folder last from one command to the next, and a server from one page's on."""

    folder: Path
    full: bool
    port: int
    rows: list[tuple[str, Screen]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    server: subprocess.Popen[bytes] | None = None
    python: str = ""

    def __post_init__(self) -> None:
        self.state = self.folder / ".state"
        self.enter(self.folder)

    def enter(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.state.with_name(".state.folder").write_text(f"{folder}\n")

    @property
    def here(self) -> Path:
        return Path(self.state.with_name(".state.folder").read_text().strip())

    def run(self, step: Step) -> None:
        """Run a step of a page; note its times, and what is wrong."""
        if step.kind == "file":
            (self.here / step.title).write_text(self._at_port(step.text), encoding="utf-8")
            return
        begin = time.perf_counter()
        print(f"\n{step.place}  $ {step.text.splitlines()[0]}", flush=True)
        screen = self._serve(step) if step.text.startswith("gecko serve") else self._command(step)
        self.rows.append((f"{step.place}  {step.text.splitlines()[0]}", screen))
        print(f"  {screen.text.strip()[-2000:]}\n  {time.perf_counter() - begin:.1f} s", flush=True)
        problem = f"exit code {screen.code}" if screen.code else _compare(step, screen.text)
        if problem:
            self.wrong.append(f"{step.place}\n{step.text}\n{problem}\nprinted:\n{screen.text[-4000:]}")

    def _command(self, step: Step) -> Screen:
        text = self._runnable(step)
        if step.kind == "python":  # the snippets of a page are one program
            before, self.python = self.python, f"{self.python}\n{text}"
            (self.here / "snippet.py").write_text(
                f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec({before!r})\n{text}"
            )
            text = "python snippet.py"
        return run_on_terminal(["bash", "-c", SHELL.format(state=self.state, command=text)], _environment())

    def _serve(self, step: Step) -> Screen:
        """Start a server in place of the one before; return what it shows until it answers."""
        self.close()
        command = SHELL.format(state=self.state, command=f"exec {step.text} --port {self.port}")
        return run_on_terminal(["bash", "-c", command], _environment(), until=self._answers, keep=self._keep)

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        self.server = process

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://localhost:{self.port}/health"):
            return True
        return False

    def _runnable(self, step: Step) -> str:
        text = self._at_port(step.text).strip()
        if text.startswith("git clone REPOSITORY"):
            return f"mkdir gecko && cp -r {' '.join(str(ROOT / name) for name in PACKAGED)} gecko"
        if text.startswith("pip install './gecko"):
            return f"{text} && rm -r gecko"
        for old, new in {} if self.full else SMALL.items():
            if not re.search("--list|--show|--resume$" if old.startswith("^gecko train") else "^$", text):
                text = re.sub(old, new, text)
        return text

    def _at_port(self, text: str) -> str:
        return text.replace("localhost:8000", f"localhost:{self.port}")

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()
            self.server = None


def _compare(step: Step, printed: str) -> str:
    if not step.output or step.note.free:
        return ""
    shown, printed = step.note.kept(step.output), step.note.kept(printed)
    if TEXT.search(step.text):
        found = lines_of(printed)
        missing = [line for line in lines_of(shown) if ABOUT.match(line) and line not in found]
        return "\n".join(("on the page, but not printed:", *missing)) if missing else ""
    return differences(shown, printed)


def newcomer(page: Path) -> Iterator[Step]:
    """Yield the steps of a page that a newcomer takes; of README those that are run, as the tutorial installs."""
    for step in steps(page):
        if page.name == "tutorial.md" or (not step.note.not_run or step.text.startswith("make demo")):
            yield step


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
        "PATH": f"{python}:{kept['PATH']}", "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "COLUMNS": "100",
        "TERM": "xterm-256color",
    }  # fmt: skip


def report(rows: list[tuple[str, Screen]]) -> str:
    """Return the table of times, in seconds."""
    lines = ["  total   first  silent  command"]
    for name, screen in rows:
        lines.append(f"{screen.seconds:7.1f} {screen.first:7.1f} {screen.silent:7.1f}  {name[:110]}")
    return "\n".join(lines)


def main() -> int:
    """Run the pages; print the table and what is wrong, and return 0 if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="words in the names of the pages to run; both by default")
    parser.add_argument("--full", action="store_true", help="run the commands at the size of the pages")
    parser.add_argument("--silence", type=float, default=5.0, metavar="S", help="longest time without output, seconds")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run in this new folder and keep it")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.mkdir(exist_ok=True)
    hour = Hour(folder.resolve(), options.full, free_port())
    try:
        for page in PAGES:
            if options.words and not any(word in page.name for word in options.words):
                continue
            hour.enter(hour.folder / page.stem)
            if page.name == "README.md":
                exec(settings()["texts"], {"folder": hour.here})
            for step in newcomer(page):
                hour.run(step)
                if hour.wrong and step.text.startswith(INSTALLS):
                    break
            hour.close()
    finally:
        hour.close()
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n" + report(hour.rows))
    for name, screen in hour.rows:
        if screen.silent > options.silence and not name.partition("  ")[2].startswith(NOT_OURS):
            hour.wrong.append(f"shows nothing for {screen.silent:.1f} s: {name}")
    print(*hour.wrong, sep="\n" + "-" * 80 + "\n")
    print(f"{len(hour.wrong)} problems in {len(hour.rows)} commands")
    return 1 if hour.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
