"""Seconds until the installed model ``books`` has written a text, and milliseconds that reading a short prompt takes.

    python benchmarks/first_text.py --write         # writes benchmarks/results/first_text_PROCESSOR.md

The command ``gecko generate`` of the wheel, in a new environment: with an empty cache, so that it compiles the decoder,
and again. Then prompts that the decoder in C reads, in turns with one call of the model, on one thread.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from measuring import of_processor, parsed, parser_of, publish, seconds_of, table

import gecko
from gecko.inference import decoder, read

ROOT = Path(__file__).parents[1]
PROMPT = "It was "
TOKENS = 320
STARTS = 5
LENGTHS = (2, 8, 16, 32, 64, 128)
TARGET = 3
"""Target in seconds for the first text."""


class Starts(NamedTuple):
    text: str
    first: list[float]
    """Seconds from start to end with an empty cache."""
    later: list[float]
    """Seconds of the next starts."""


def installed_starts(count: int = STARTS) -> Starts:
    """Install the wheel in a new environment and time the command from start to end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        environment.pop("PYTHONPATH", None)

        def run(*command: str | Path, cache: str = "cache") -> str:
            own = {**environment, "XDG_CACHE_HOME": str(folder / cache)}
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own, cwd=folder).stdout

        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", ROOT)
        run(sys.executable, "-m", "venv", folder / "new")
        (wheel,) = folder.glob("*.whl")
        run(folder / "new" / "bin" / "pip", "install", "--quiet", wheel)
        command = (folder / "new/bin/gecko", "generate", "books", "--prompt", PROMPT, "-n", str(TOKENS), "--seed", "1")
        seconds: tuple[list[float], list[float]] = [], []
        for number in range(count):
            for times in seconds:
                times.append(seconds_of(partial(run, *command, cache=f"start-{number}")))
        return Starts(run(*command, cache="start-0"), *seconds)


def reading(length: int) -> tuple[float, float]:
    """Return milliseconds to read a prompt of ``books``: by the decoder, and by one call of the model."""
    model = gecko.load("books")
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))
    by_steps, by_call, work = list[float](), list[float](), partial(read, model, [prompt])
    for _ in range(41):
        by_steps.append(seconds_of(work))
        with mock.patch.object(decoder, "MOST_PRODUCTS", 0):
            by_call.append(seconds_of(work))
    return 1e3 * statistics.median(by_steps), 1e3 * statistics.median(by_call)


def main() -> None:
    given = parsed(parser_of(__doc__))
    starts = installed_starts()
    torch.set_num_threads(1)
    readings = [(length, *reading(length)) for length in LENGTHS]
    print(starts.text)
    kinds = {"first, the decoder is compiled": starts.first, "later": starts.later}
    publish(
        of_processor("first_text"), given, "First text", "",
        f"`gecko generate books --prompt {PROMPT!r} -n {TOKENS} --seed 1` from the wheel in a new environment: seconds "
        f"from start to end, {STARTS} starts. Target for the first: {TARGET} s.",
        table(["start", "median|.2f", "least|.2f", "most|.2f"],
              ((name, statistics.median(times), min(times), max(times)) for name, times in kinds.items())),
        "Prompts of `books` (bfloat16), one thread: milliseconds until the logits of the next token.",
        table(["tokens|,", "the decoder reads them|.1f", "one call of the model|.1f", "ratio|.2f"],
              ((length, steps, call, steps / call) for length, steps, call in readings)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
