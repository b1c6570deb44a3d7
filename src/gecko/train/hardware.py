"""What a run was trained on, in words."""

from __future__ import annotations

import os
import platform

import torch

from gecko.ops import native
from gecko.processor import processor_name


def describe_hardware(device: torch.device, ranks: int = 1) -> dict[str, str]:
    """Device, processor, memory and software versions, of this rank's machine."""
    facts = {"Processor": f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} used by PyTorch"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if ranks > 1:
        facts["Processes"] = f"{ranks} ranks"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["Memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    facts["Software"] = f"{platform.system()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    return facts


def select_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device ``name`` stands for; ValueError where this machine lacks it.

    ``auto`` and ``cuda`` are the GPU of the number ``local_rank`` for one of several processes on a machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}.") from error
    if device.type == "cuda" and device.index is None and local_rank is not None:
        device = torch.device("cuda", local_rank)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device must be on this machine, with {count} CUDA devices; got {str(device)!r}. Try device=cpu, or fewer "
            "processes."
        )
    if device.type == "cuda" and local_rank is not None:
        torch.cuda.set_device(device)
    return device


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether ``device`` has bf16 products of its own; without them they are slower than float32. So are those of
    PyTorch on a CPU beside kernels in C that were built without such products."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    in_hardware = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return in_hardware and (native.library() is None or native.multiplies_bfloat16())
