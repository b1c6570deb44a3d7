"""What this machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from gecko.ops.kernels import kernels_installed
from gecko.ops.native import missing

DISTRIBUTION = "gecko-lm"
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Package:
    """An optional package; ``version`` is None where it is missing."""

    name: str
    extra: str
    version: str | None

    @property
    def remedy(self) -> str:
        return f"pip install '{DISTRIBUTION}[{self.extra}]'"


def software() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def processor() -> dict[str, str]:
    from gecko.processor import processor_field, processor_name

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
    """By device; one line that says so where there is none."""
    if not torch.cuda.is_available():
        return {"GPU": "none that this PyTorch can use"}
    found = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    return found


def paths() -> dict[str, str]:
    """Which ways of computing are taken here."""
    from gecko.train.hardware import multiplies_bfloat16

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fast = multiplies_bfloat16(torch.device(device))
    return {
        "device": f"{device}, as device=auto means here",
        "operators": _operators(device),
        "bfloat16": "in hardware: precision=bfloat16 may pay" if fast else "emulated: stay with precision=float32",
    }


def _operators(device: str) -> str:
    eager = "chunked PyTorch forms for prompts and training, one-token forms for decoding"
    if device == "cpu":
        return f"without C kernels ({missing()}): {eager}" if missing() else f"C kernels; for float64 {eager}"
    if not kernels_installed():
        return f"{eager}; without the Triton kernels: pip install 'gecko-lm[kernels]'"
    return f"Triton kernels; for float64 {eager}"


def optional_packages() -> list[Package]:
    """What the installed package's extras name, without its extra for development; by the smallest extra of each."""
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
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
