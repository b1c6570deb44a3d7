"""``gecko doctor``: describe the machine and test the operators on it."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gecko.cli.command import Command
from gecko.runtime.process import processor_field, processor_name
from gecko.runtime.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from gecko.cli.self_test import Finding

DISTRIBUTION = "gecko-lm"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve", "bf16")


class Package(NamedTuple):
    """An optional package and the extra that installs it."""

    name: str
    extra: str
    version: str | None
    """None if the package is not installed."""


def software() -> dict[str, str]:
    import torch

    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def processor() -> dict[str, str]:
    import torch

    features = (processor_field("flags") or processor_field("Features")).split()
    return {
        "processor": f"{processor_name() or 'unknown'}, {os.cpu_count()} cores",
        "features": ", ".join(name for name in CPU_FEATURES if name in features) or "unknown",
        "PyTorch uses": torch.backends.cpu.get_cpu_capability(),
    }


def resources(folder: Path) -> dict[str, str]:
    facts = {"disk": f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"}
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(name) * page / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        facts["memory"] = f"{total:.1f} GB, of which {free:.1f} GB are unused"
    return facts


def graphics() -> dict[str, str]:
    """Describe each GPU, by device name."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    found = {
        f"cuda:{index}": f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, compute capability {gpu.major}.{gpu.minor}"
        for index, gpu in enumerate(gpus)
    }
    return found or {"GPU": "none that this PyTorch can use"}


def paths() -> dict[str, str]:
    """Describe the device, the operators and the precision that training uses on this machine."""
    import torch

    from gecko.train.throughput import multiplies_bfloat16

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = multiplies_bfloat16(torch.device(device))
    return {
        "device": f"{device}, with device=auto",
        "operators": _operators(device),
        "bfloat16": "in hardware: precision=bfloat16 may be faster"
        if fast
        else "emulated: stay with precision=float32",
    }


def _operators(device: str) -> str:
    from gecko.ops.backends.cpu import missing
    from gecko.ops.backends.dispatch import triton_kernels_installed

    eager = "chunked PyTorch operators for prompts and training, recurrent ones for decoding"
    if device == "cpu":
        return f"without C kernels ({missing()}): {eager}" if missing() else f"C kernels; for float64 {eager}"
    if not triton_kernels_installed():
        return f"{eager}; without the Triton kernels: pip install 'gecko-lm[kernels]'"
    return f"Triton kernels; for float64 {eager}"


def optional_packages() -> list[Package]:
    """Return the packages of all extras except ``dev``, each with the smallest extra that installs it."""
    import importlib.metadata

    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = (re.match(r"""([\w.-]+)[^;]*;\s*extra == ["'](\w+)["']""", requirement) for requirement in required)
    named = [(match[1], match[2]) for match in matches if match and match[2] != "dev"]
    sizes = Counter(extra for _, extra in named)
    extras = {name: [extra for other, extra in named if other == name] for name, _ in named if name != DISTRIBUTION}
    return [Package(name, min(extras[name], key=sizes.__getitem__), _version(name)) for name in sorted(extras)]


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


UNHEALTHY = 1


class Doctor(Command):
    """Describe this machine, and test that the operators compute correctly on it.

    The self-test runs on the CPU and, if there is one, on the GPU. It takes seconds. The exit code is 1 if a check
    fails.

    **Example**

        gecko doctor
    """

    def run(self) -> None:
        console = Terminal(markup=True)
        facts = {**software(), **processor(), **resources(Path.cwd()), **graphics()}
        _print_table(console, "This machine", facts.items())
        _print_table(console, "Used for training and inference", paths().items())
        if packages := optional_packages():
            install = f"missing; pip install '{DISTRIBUTION}[{{}}]'"
            rows = ((name, version or install.format(extra)) for name, extra, version in packages)
            _print_table(console, "Optional packages", rows)
        else:
            console.print(f"Optional packages: unknown, as {DISTRIBUTION} is not installed. Run: pip install -e .\n")
        findings = [finding for device in _devices() for finding in _examine(console, device)]
        failed = sum(not finding.passed for finding in findings)
        if failed:
            console.print(
                f"[bold red]{failed} of {len(findings)} checks failed.[/] Do not trust results on this machine."
            )
            raise typer.Exit(UNHEALTHY)
        console.print(f"[bold green]All {len(findings)} checks passed.[/]")


def _devices() -> list[torch.device]:
    import torch

    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def _examine(console: Console, device: torch.device) -> list[Finding]:
    from gecko.cli.self_test import self_test

    with console.status(f"testing on {device}"):
        findings = self_test(device)
    verdicts = {True: Text("pass", "green"), False: Text("FAIL", "bold red")}
    rows = ((finding.name, verdicts[finding.passed], finding.detail) for finding in findings)
    _print_table(console, f"Self-test on {device}", rows)
    return findings


def _print_table(console: Console, title: str, rows: Iterable[Iterable[str | Text]]) -> None:
    """Print rows of texts, which are shown as they are."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table, "")
