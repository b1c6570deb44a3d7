"""The libraries of C kernels are built once and shared; if they cannot be built, the eager forms run."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from support import cases
from support.native_agreement import needs_compiler
from torch.utils.flop_counter import FlopCounterMode

from gecko.ops.backends import cpu as native
from gecko.ops.backends import cpu_library
from gecko.ops.backends.dispatch import _cpu_kernels_installed, cpu_kernels_run_on
from gecko.ops.cema import CEMACoefficients, cema


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a library that the first build of these tests leaves for the others, which copy it."""
    return tmp_path_factory.mktemp("built") / "library.so"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Path) -> Iterator[Path]:
    """Use an empty cache, with nothing loaded. Builds are not optimised, and only the first one compiles."""
    run = cpu_library._run

    def run_or_copy(command: list[str]) -> str:
        if "-o" not in command or ("-c" in command and not kept.exists()):
            return run(command)
        if "-c" in command:  # the copy needs no object files
            return ""
        if not kept.exists():
            run([str(kept) if command[i - 1] == "-o" else word for i, word in enumerate(command)])
        shutil.copyfile(kept, command[command.index("-o") + 1])
        return ""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in cpu_library._FLAGS))
    monkeypatch.setattr(cpu_library, "_run", run_or_copy)
    _forget()
    yield tmp_path / "gecko"
    _forget()


def _forget() -> None:
    for cached in (native._loaded, native._warn, cpu_library._folder, _cpu_kernels_installed):
        cached.cache_clear()
    native._functions.clear()  # or other tests would go on with functions that were not optimised


def _average() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    parameters = (x.float() for x in cases.CEMA.draw_parameters(generator))
    return cema(torch.randn(2, 70, 5, generator=generator), CEMACoefficients.from_parameters(*parameters))[0]


SLOW_COMPILER = """#!/bin/sh
case " $* " in
*" -c "*) ;;
*" -o "*)
    while [ "$1" != "-o" ]; do shift; done
    echo once >> "$(dirname "$0")/built"
    head -c 50000 LIBRARY > "$2" && sleep 1 && cat LIBRARY > "$2" ;;
*) exec COMPILER "$@" ;;
esac
"""
"""A compiler that copies a library, and takes a second, in which the file is not whole."""


def _processes(count: int, folder: Path, library: Path) -> list[int]:
    """Return the exit codes of processes that build the library at the same time, with a slow compiler."""
    script = SLOW_COMPILER.replace("LIBRARY", str(library)).replace("COMPILER", cpu_library._compiler())
    folder.mkdir()
    for name in cpu_library.COMPILERS:
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    code = "from gecko.ops.backends.cpu import library; assert library() is not None"
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(count)]
    return [process.wait() for process in started]


@needs_compiler
def test_it_is_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    (built,) = fresh.glob("*.so")
    native._loaded.cache_clear()
    commands: list[list[str]] = []
    run = cpu_library._run
    monkeypatch.setattr(cpu_library, "_run", lambda command: commands.append(command) or run(command))
    assert native.library() is not None
    assert [built] == list(fresh.glob("*.so"))
    assert not [command for command in commands if "-o" in command]


@needs_compiler
def test_other_sources_are_another_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    monkeypatch.setattr(cpu_library, "_FLAGS", (*cpu_library._FLAGS, "-DOTHER"))
    native._loaded.cache_clear()
    native.library()
    assert len(list(fresh.glob("*.so"))) == 2


@needs_compiler
def test_of_processes_that_start_together_one_builds(fresh: Path, kept: Path, tmp_path: Path) -> None:
    native.library()
    shutil.rmtree(fresh)
    assert _processes(3, tmp_path / "compilers", kept) == [0, 0, 0]
    assert len(list(fresh.glob("*.so"))) == 1
    assert (tmp_path / "compilers" / "built").read_text() == "once\n"


@needs_compiler
def test_a_library_is_built_while_other_modules_are_imported(fresh: Path) -> None:
    cpu_library.start_building("decoding")
    assert native.library("decoding") is not None
    assert [path.name.split("-")[0] for path in fresh.glob("*.so")] == ["decoding"]


def test_every_c_file_is_in_one_library() -> None:
    of_decoding, others = map(cpu_library.sources, get_args(cpu_library.Name))
    assert {path.parent.name for path in of_decoding} == {"decoding"}
    assert sorted(of_decoding + others) == sorted(Path(cpu_library.__file__).parents[1].rglob("*.c"))


def test_a_thread_that_cannot_build_says_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread logs nothing. The call that needs the library logs the reason."""
    monkeypatch.setenv("PATH", "")
    cpu_library._try_to_build("decoding")
    assert not caplog.messages
    assert native.library("decoding") is None
    assert len(caplog.messages) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(fresh: Path) -> None:
    fresh.write_text("not a folder")
    assert native.library() is not None


@needs_compiler
def test_a_user_without_a_home_is_done_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert native.library() is not None
    assert not Path("relative").exists()


@pytest.mark.parametrize("compiler", ["missing", "broken"])
def test_without_a_compiler_the_eager_forms_run(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, compiler: str
) -> None:
    with_kernels = _average()
    _forget()
    shutil.rmtree(fresh, ignore_errors=True)
    if compiler == "broken":
        (tmp_path / "gcc").write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
        (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert not cpu_kernels_run_on(torch.zeros(1))
        without = _average()
        _average()
    torch.testing.assert_close(without, with_kernels, rtol=1e-5, atol=1e-5)
    (line,) = caplog.messages
    assert ("none of gcc, cc is installed" if compiler == "missing" else "no space left") in line
    assert not list(fresh.glob("*.so"))


def test_what_the_kernels_do_not_take() -> None:
    x = torch.zeros(2)
    assert not cpu_kernels_run_on(x.double())
    assert not cpu_kernels_run_on(x, x.bfloat16())
    assert not cpu_kernels_run_on(x.to("meta"))
    with torch._subclasses.FakeTensorMode():
        assert not cpu_kernels_run_on(torch.zeros(2))
    with FlopCounterMode(display=False):  # it counts PyTorch's operations
        assert not cpu_kernels_run_on(x)
