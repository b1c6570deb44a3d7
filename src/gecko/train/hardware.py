"""What a run was trained on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_hardware(device: torch.device) -> dict[str, str]:
    """Device, processor, memory and software versions."""
    facts = {"Processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} used by PyTorch"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["Memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    facts["Software"] = f"{platform.system()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
