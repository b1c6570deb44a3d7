"""The command as a whole: help, errors and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupts import take_interrupts

import gecko


def test_help_shows_every_command(command: Callable[..., Any]) -> None:
    result = command("--help")
    assert result.exit_code == 0
    for name in ("train", "generate", "info", "doctor"):
        assert name in result.stdout
        helped = command(name, "--help")
        assert helped.exit_code == 0
        assert f"gecko {name}" in helped.stdout, "help must show an example"


def test_version(command: Callable[..., Any]) -> None:
    assert command("--version").stdout.strip() == f"gecko {gecko.__version__}"


def test_an_error_is_one_message(process: Callable[..., Any], tmp_path: Path) -> None:
    result = process("generate", tmp_path / "nowhere")
    assert result.returncode == 2
    assert result.stdout == b""
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("error: MODEL must be a folder")
    assert "nowhere" in line


def test_debug_shows_where_it_comes_from(process: Callable[..., Any], tmp_path: Path) -> None:
    result = process("--debug", "generate", tmp_path / "nowhere")
    assert result.returncode != 0
    assert b"Traceback" in result.stderr
    assert b"FileNotFoundError" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ValueError("what must hold"), 2, "what must hold"),
        (FileNotFoundError("no file x"), 2, "no file x"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 2, "x.txt: No such file or directory."),
        (OSError(28, "could not write x; No space left"), 2, "could not write x; No space left"),
        (ImportError("pip install 'gecko-lm[data]'"), 2, "gecko-lm[data]"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, shown: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("gecko.cli.doctor.software", fail)
    result = command("doctor")
    assert result.exit_code == code
    assert shown in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bug_is_not_dressed_up_as_a_message(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's message says nothing to a user; the place in the code does.
    monkeypatch.setattr("gecko.cli.doctor.software", lambda: torch.zeros(2) @ torch.zeros(3))
    result = command("doctor")
    assert isinstance(result.exception, RuntimeError)
    assert not isinstance(result.exception, SystemExit)


def test_a_reader_that_goes_away_is_no_error(run_folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gecko", "generate", run_folder, "-n", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(5).isalpha()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 141


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupt_ends_at_once_and_quietly(run_folder: Path, environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gecko", "generate", run_folder, "-n", "10000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, preexec_fn=take_interrupts,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(5)
        running.send_signal(signal.SIGINT)
        begin = time.monotonic()
        running.stdout.read()
        assert running.stderr.read() == b""
        assert running.wait(timeout=60) == 130
        assert time.monotonic() - begin < 20
