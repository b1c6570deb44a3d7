"""Helpers of benchmarks that read texts: the model, the text, the memory of this process, and the result pages."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import cycle
from pathlib import Path

import psutil
import torch
from torch import Tensor

import gecko
from gecko.data.sources import stdlib_files
from gecko.runtime.process import processor_name
from gecko.train import latest_checkpoint
from gecko.train.throughput import describe_hardware

BLOCK = 1 << 14
RESULTS = Path(__file__).parent / "results"
DEMO = "runs/demo"
START = torch.tensor([256])
"""Token that starts a document of bytes."""


def find_model(name: str) -> Path:
    """Return a model's folder, or the newest checkpoint of a run."""
    checkpoints = Path(name) / "checkpoints"
    newest = latest_checkpoint(checkpoints) if checkpoints.is_dir() else Path(name)
    if newest is None:
        raise FileNotFoundError(f"{checkpoints} must hold a checkpoint; it has none: gecko train tiny --out {name}")
    return newest


def text_files(names: Sequence[str]) -> list[Path]:
    """Return the named files, or the source of Python's standard library."""
    return [Path(name) for name in names] or stdlib_files()


def byte_tokens(files: Sequence[Path], length: int) -> Iterator[Tensor]:
    """Yield the first ``length`` bytes of the repeated files, as ids in small parts."""
    for path in cycle(files):
        with path.open("rb") as file:
            while length > 0 and (content := file.read(min(BLOCK, length))):
                length -= len(content)
                yield torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        if length == 0:
            return


def parser_of(doc: str | None, *, threads: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that can write a page."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the page into benchmarks/results")
    if threads:
        parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def machine() -> str:
    """Describe the processor, the memory and the software."""
    return "; ".join(describe_hardware(torch.device("cpu")).values())


def command(arguments: argparse.Namespace) -> str:
    """Return the command with the values of all its options; of files, only their names."""
    parts = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    for name, value in vars(arguments).items():
        values = [
            Path(one).name if "/" in str(one) else str(one) for one in (value if isinstance(value, list) else [value])
        ]
        if value not in (None, False, "", []):
            parts += [f"--{name.replace('_', '-')}", *(values if value is not True else [])]
    return shlex.join(parts)


def describe(model: gecko.Gecko, folder: Path, files: Sequence[Path], command: str) -> str:
    """Return a paragraph that describes model, text, machine and command."""
    text = "the source of Python's standard library" if len(files) > 20 else ", ".join(path.name for path in files)
    count, name = sum(parameter.numel() for parameter in model.parameters()), "/".join(folder.parts[-3:])
    about = f"Model: {name}, {count:,} parameters, float32. Text: {text}."
    return f"{date.today()}, {machine()}. {about} Command: `{command}`."


def load() -> str:
    """Return the load of the machine in the last minute, for pages that are measured beside other work."""
    return f"Load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores when this was written."


def resident() -> int:
    """Return the memory in use, in bytes, without free memory that the C library keeps."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def peak() -> int:
    """Return the largest memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def of_processor(name: str) -> str:
    """Return ``name`` with the name of this processor, because timings of each processor are a separate page."""
    processor = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@.*", " ", processor_name().lower())
    return "_".join([name, *re.findall(r"[a-z0-9.]+", processor)]) + ".md"


def publish(name: str, lines: Sequence[str], write: bool) -> None:
    """Print a page, and with ``write`` put it into the folder of results."""
    print("\n".join(lines) + "\n")
    if write:
        put(name, lines)


def put(name: str, lines: Sequence[str]) -> None:
    """Put a page into the folder of results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
