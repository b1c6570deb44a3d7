"""Run the commands and the Python snippets of README, docs/ and examples/, and compare the form of what they print.

``make test-docs`` runs all pages, ``python tests/documents/check.py serving README`` those whose names contain a word.
One small model, trained first, stands for all models that the pages name. Each page has a folder of its own with
that model and the texts. ``pages.toml`` says how they are made, what makes a command small, and what is not run and
why; every other command and snippet is run. ``first_hour.py`` runs the tutorial and README in a new environment.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from documents.first_hour import free_port
from documents.forms import differences, form, form_of_values, missing_lines
from documents.plan import PAGES, ROOT, Step, name_of, settings, steps
from documents.warm import __file__ as warm_file
from documents.warm import warm

SECONDS = 120
"""Time limit of one command."""
WRITES_TEXT = re.compile(r"\bgecko (?:generate|chat)\b")
"""Commands whose standard output is text of the model."""
SERVES = "gecko serve "


class Shell:
    """A shell in a folder, as in a reader's terminal: variables last from one command to the next."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self._port = folder, port
        self._bash = subprocess.Popen(
            ["bash", "--norc"], cwd=folder, env=_environment(folder), text=True, bufsize=1, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, standard output and standard error (in one, unless a model writes)."""
        apart = WRITES_TEXT.search(command) is not None
        (self.folder / ".command").write_text(command.replace("localhost:8000", f"localhost:{self._port}") + "\n")
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"{{ . ./.command; }} >.out 2>{'.err' if apart else '&1'} </dev/null; echo $?\n")
        if not select.select([self._bash.stdout], [], [], SECONDS)[0]:
            self._bash.kill()
            raise TimeoutError(f"the command takes more than {SECONDS} s")
        code = int(self._bash.stdout.readline() or 1)
        return code, _read(self.folder / ".out"), _read(self.folder / ".err") if apart else ""

    def serve(self, command: str) -> str:
        """Start a server in place of the one before; return what it prints until it answers."""
        self.stop_server()
        with (self.folder / ".out").open("wb") as out:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command} --port {self._port}"], cwd=self.folder, env=_environment(self.folder),
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        while self._server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://localhost:{self._port}/health"):
                return _read(self.folder / ".out")
            time.sleep(0.1)
        raise RuntimeError(_read(self.folder / ".out"))

    def stop_server(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()

    def close(self) -> None:
        self.stop_server()
        self._bash.kill()
        self._bash.wait()


class Page:
    """The steps of a page, run in its folder: one shell, and one namespace of Python."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.shell = Shell(folder, self.port)
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, step: Step) -> str:
        """Run a step; return what is wrong, or an empty text."""
        if step.kind == "file":
            (self.shell.folder / step.title).write_text(self._at_port(step.text), encoding="utf-8")
            return ""
        if step.kind == "other":
            return "this is neither a command after $ nor Python: pages.toml must say why it is not run"
        with contextlib.chdir(self.shell.folder):
            exec(step.note.given, self.names)
            return self._command(step) if step.kind == "command" else self._python(step)

    def _command(self, step: Step) -> str:
        command = step.runnable
        if command.startswith(SERVES):
            return _compare(step, self.shell.serve(command))
        code, out, err = self.shell.run(command)
        expected = step.note.exit if step.note.exit is not None else 2 * bool(re.search("^error: ", step.output, re.M))
        if code != expected:
            return f"exit code {code}, expected {expected}\n{(out + err)[-3000:]}"
        if not WRITES_TEXT.search(command):
            return _compare(step, out)
        missing = missing_lines(step.output, step.note.kept(err)) if step.output else []
        return "\n".join(("printed, but not on the page:", *missing)) if missing else ""

    def _python(self, step: Step) -> str:
        text = self._at_port(step.runnable)
        if text.startswith(">>>"):
            return self._dialogue(step, text)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(text, step.place, "exec"), self.names)
        return _compare(step, printed.getvalue(), form_of_values)

    def _at_port(self, text: str) -> str:
        return text.replace("localhost:8000", f"localhost:{self.port}")

    def _dialogue(self, step: Step, text: str) -> str:
        """Run lines after ``>>>`` and compare what they return with the line below."""
        entered = [line.removeprefix(">>> ") for line in text.splitlines() if line.startswith(">>> ")]
        found = ""
        for line in entered:
            try:
                tree = ast.parse(line, step.place)
                if isinstance(tree.body[-1], ast.Expr):
                    found += repr(eval(line, self.names)) + "\n"
                else:
                    exec(line, self.names)
            except Exception as error:
                found += f"{type(error).__name__}: {error}\n"
        shown = "\n".join(line for line in text.splitlines() if not line.startswith(">>>"))
        return differences(shown, found)


def _compare(step: Step, printed: str, kind: Any = form) -> str:
    if not step.output or step.note.free:
        return ""
    problem = differences(step.note.kept(step.output), step.note.kept(printed), kind)
    return f"{problem}\nprinted:\n{printed[-6000:]}" if problem else ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "COLUMNS": "80", "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1",
        "SMALL": settings()["small"],
    }  # fmt: skip


def make_folder(folder: Path, gecko: str) -> None:
    """Make the folder with the model and the texts that the pages name; ``gecko`` is the command without settings."""
    (folder / "bin").mkdir()
    for name, text in settings()["programs"].items():
        program = folder / "bin" / name
        program.write_text(text.replace("PYTHON", sys.executable).replace("GECKO", gecko), encoding="utf-8")
        program.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    exec(settings()["texts"], {"folder": folder})
    with contextlib.closing(Shell(folder, free_port())) as shell:
        for command in settings()["models"]:
            code, out, err = shell.run(command.replace("GECKO", gecko))
            if code != 0:
                raise RuntimeError(f"{command}\n{out}{err}")


def check(path: Path, made: Path, folder: Path) -> list[str]:
    """Run a page in ``folder``, a copy of ``made``; return what is wrong."""
    to_run, found = [step for step in steps(path) if not step.note.not_run], list[str]()
    if not to_run:
        return found
    shutil.copytree(made, folder, symlinks=True)
    page = Page(folder)
    try:
        for step in to_run:
            begin = time.perf_counter()
            try:
                wrong = page.run(step)
            except (Exception, SystemExit):
                wrong = traceback.format_exc(limit=-3)
            print(f"{'FAILED' if wrong else 'ok':6} {time.perf_counter() - begin:5.1f} s  {step.place}", flush=True)
            if wrong:
                found.append(f"{step.place}\n{step.runnable}\n{wrong}\n")
    finally:
        page.shell.close()
        shutil.rmtree(folder)
    return found


def main() -> int:
    """Check the pages; print what is wrong, and return 0 if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="words in the names of the pages to check; all by default")
    words = parser.parse_args().words
    pages = [path for path in PAGES if not words or any(word in name_of(path) for word in words)]
    os.environ.update(
        OMP_NUM_THREADS="1", COLUMNS="80", HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))
    )
    with tempfile.TemporaryDirectory(prefix="documents-", ignore_cleanup_errors=True) as temporary:
        made, address = Path(temporary) / "made", f"{temporary}/socket"
        made.mkdir()
        longest_first = sorted(pages, key=lambda path: len(steps(path)), reverse=True)
        folders = [Path(temporary, str(number)) for number in range(len(pages))]
        with warm(address), ProcessPoolExecutor(os.cpu_count()) as pool:
            make_folder(made, f"{sys.executable} -S {warm_file} {address}")
            found = pool.map(check, longest_first, [made] * len(pages), folders)
            wrong = [problem for problems in found for problem in problems]
    print(*wrong, sep="\n" + "-" * 80 + "\n")
    left = sum(bool(step.note.not_run) for path in pages for step in steps(path))
    print(f"{len(wrong)} problems; {left} commands and blocks are not run, for the reasons in pages.toml")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
