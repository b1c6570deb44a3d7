"""What a terminal shows of what a command writes, and the times of a command on it."""

from __future__ import annotations

import sys

import pytest
from documents.terminal import run_on_terminal, shown


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("10 %\r\x1b[2K20 %\r\n", "20 %\n"),  # a bar that is drawn again
        ("bar\r\n\x1b[1A\x1b[2Kstep 1\r\nbar", "step 1\nbar\n"),  # a line above a bar
        ("\x1b[1mbold\x1b[0m \x1b[?25lend\r\n", "bold end\n"),
        ("abc\r\x1b[Kd", "d\n"),
        ("ab\bc", "ac\n"),
    ],
)
def test_the_screen_in_the_end(written: str, lines: str) -> None:
    assert shown(written) == lines


def test_times_and_exit_code_of_a_command() -> None:
    code = "import sys, time; print(sys.stdout.isatty(), flush=True); time.sleep(0.5); sys.exit(3)"
    screen = run_on_terminal([sys.executable, "-c", code], {})
    assert (screen.text, screen.code) == ("True\n", 3)
    # The first byte is seen a little after it was written, so the silence seems a little shorter than the sleep.
    assert 0.4 <= screen.silent <= screen.seconds and screen.first < screen.seconds
