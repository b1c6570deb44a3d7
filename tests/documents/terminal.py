"""A command on a terminal: what its screen shows in the end, and for how long it showed nothing."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

COLUMNS = 100
_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b.|([\r\n\b])|([^\x1b\r\n\b]+)")


@dataclass(frozen=True)
class Screen:
    """What a command left on the screen, and its times in seconds."""

    text: str
    code: int
    seconds: float
    first: float
    """Time until the first output."""
    silent: float
    """Longest time without output, from the start to the end."""


def run_on_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    until: Callable[[], bool] | None = None,
    keep: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Screen:
    """Run a command on a terminal to its end, or ``until`` it has started; what goes on then is given to ``keep``."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    output, times = bytearray(), [begin]
    while True:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                output += os.read(ours, 1 << 16)
            except OSError:  # the terminal has no writer any more
                break
            times.append(time.perf_counter())
        elif until is not None and (process.poll() is not None or until()):  # asked in silence: all lines are there
            break
    if until is None or process.poll() is not None:
        code = process.wait()
        os.close(ours)
    else:
        code = 0
        assert keep is not None
        keep(process)
    times.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(times)]
    return Screen(shown(output.decode(errors="replace")), code, times[-1] - begin, gaps[0], max(gaps))


def shown(written: str) -> str:
    """Return the lines that a terminal shows after this was written; colours are left out."""
    lines, row, column = [""], 0, 0
    for found in _TOKEN.finditer(written):
        number = int(found[1]) if found[1] and found[1].isdigit() else 1
        if found[4]:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + found[4] + line[column + len(found[4]) :]
            column += len(found[4])
        elif found[3] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif found[3]:
            column = 0 if found[3] == "\r" else max(0, column - 1)
        elif found[2] == "A":
            row = max(0, row - number)
        elif found[2] == "K":
            lines[row] = "" if found[1] == "2" else lines[row][:column]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"
