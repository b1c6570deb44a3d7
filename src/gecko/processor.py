"""The processor that this runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    return processor_field("model name") or platform.processor() or platform.machine()


def processor_field(name: str) -> str:
    """What Linux says of the first core; nothing where it does not say, or on another system."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for field, _, value in fields if field.strip() == name), "")
