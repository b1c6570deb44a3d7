"""Hardware of a run and how well it is used: device, FLOPs, memory and traces.

MFU (model FLOPs utilisation) = tokens per second × FLOPs per token / (devices × peak FLOPs per second). Recomputation
by activation checkpointing does not count as work, so it lowers the MFU.
"""

from __future__ import annotations

import os
import platform
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gecko.config import GeckoConfig
from gecko.models import LlamaConfig, ModelConfig, meta_model
from gecko.ops.backends import cpu as native
from gecko.runtime.private import has_bfloat16_products, has_bfloat16_tiles
from gecko.runtime.process import processor_name
from gecko.train.run import Run, is_half


def describe_hardware(device: torch.device, ranks: int = 1) -> dict[str, str]:
    """Return device, processor, memory and software versions of this rank's machine."""
    # Processors of one name can differ in what they compute at once.
    name = f"{processor_name()} with {torch.backends.cpu.get_cpu_capability()}"
    facts = {"Processor": f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} used by PyTorch"}
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
    """Return the device called ``name``. Raise ValueError if this machine does not have it.

    With several processes per machine, ``auto`` and ``cuda`` select the GPU with index ``local_rank``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}. Try cpu.")
    if device.type == "cuda" and device.index is None and local_rank is not None:
        device = torch.device("cuda", local_rank)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device must be on this machine, with {count} CUDA devices; got {str(device)!r}. Try cpu, or fewer "
            "processes."
        )
    if device.type == "cuda" and local_rank is not None:
        torch.cuda.set_device(device)
    return device


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether bf16 products are faster than float32: whether the device has instructions for them, and on a CPU
    whether the C kernels, if there are any, were built with them."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    in_hardware = has_bfloat16_products() or has_bfloat16_tiles()
    return in_hardware and (native.library() is None or native.multiplies_bfloat16())


PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12,
    "L40S": 362e12, "A40": 150e12, "RTX 4090": 165e12, "V100": 125e12,
}  # fmt: skip
"""Peak dense FLOP/s in bfloat16 (V100: float16), from the vendors' data sheets. The first key that occurs in the
device's name as whole words applies."""


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the training FLOPs per token of rows of ``length`` tokens. A multiply-add counts as two FLOPs, and the
    backward pass as twice the forward pass: 3 · 2 · (parameters of matrices, without the embedding + (Z + V) · mean
    number of keys per query + n · Z · V / heads for the working memory).

    n is 3 for the adaptive rule (read, correct, write) and 2 for the linear one. In a Llama, Z and V are the model's
    width, and a query attends to half of its row. Norms, CEMA and element-wise operations are not counted.
    """
    if isinstance(config, LlamaConfig):
        mixing = config.num_layers * 2 * config.model_dim * length / 2
    else:
        keys = _mean_keys(config, length)
        maps = {"adaptive": 3, "orthogonal": 3, "linear": 2, "none": 0}[config.memory]
        memory = maps * config.key_dim * config.value_head_dim
        mixing = config.num_layers * ((config.key_dim + config.value_dim) * keys + memory)
    return 3 * 2 * (sum(linear_products(config)) + mixing)


def _mean_keys(config: GeckoConfig, length: int) -> float:
    """Return the mean number of keys that a query of a row of ``length`` tokens attends to, without sinks."""
    chunk, first = config.chunk_size, min(length, config.chunk_size)
    pairs = first * (first + 1) / 2 + chunk * (length - first)  # of a sliding window
    if config.attention != "sliding_window":
        whole, rest = divmod(length, chunk)
        before = chunk * (length - first) * (config.attention == "sliding_chunk")
        pairs = (whole * chunk * (chunk + 1) + rest * (rest + 1)) / 2 + before
    return pairs / length


@lru_cache(maxsize=4)
def linear_products(config: ModelConfig) -> tuple[int, int]:
    """Return the multiply-adds per token of the linear layers in all blocks, and of the head."""
    model = meta_model(replace(config, num_layers=1))  # all blocks have the same shapes
    block, whole = (
        sum(layer.weight.numel() for layer in part.modules() if isinstance(layer, nn.Linear))
        for part in (model.blocks, model)
    )
    return config.num_layers * block, whole - block


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one device: from the table for a known GPU, else measured with a matrix product."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        known = next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
        if known is not None:
            return known
    return _measured_flops(device, dtype, torch.get_num_threads())


def mfu_per_speed(run: Run, device: torch.device, devices: int) -> float:
    """Return the MFU of a run at one token per second."""
    dtype = torch.bfloat16 if is_half(run.precision) else torch.float32
    return flops_per_token(run.model, run.sequence_length) / (devices * peak_flops(device, dtype))


_MEASURED = {"cuda": (8192, 4), "cpu": (768, 1)}
"""Size of the matrices and number of products of a measurement. On a GPU launching them takes little of its time."""


@cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the best FLOP/s of a few measurements. They take some hundredths of a second, on a slow GPU seconds."""
    size, products = _MEASURED["cuda" if device.type == "cuda" else "cpu"]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for _ in range(4):
        wait()
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        wait()
        seconds.append(time.perf_counter() - begin)
    return products * 2 * size**3 / min(seconds)


class ProfileWindow:
    """Records the steps from ``window[0]`` to ``window[1]``, counted from 1, and writes them as a Chrome trace. A
    session that starts or ends within the window writes its part; the file name contains the range."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._window, self._folder, self._rank = window, folder, rank
        self._profiler: Any = None
        self._first = self._last = 0

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return a context for the step ``number``. Call it for every step, because it also ends the recording."""
        if self._window is None or not self._window[0] <= number <= self._window[1]:
            self.finish()
            return nullcontext()
        if self._profiler is None:
            self._first = number
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
        self._last = number
        return torch.profiler.record_function(f"step {number}")

    def finish(self) -> None:
        """Stop recording, and write the trace if there is one."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._first}-{self._last}-rank-{self._rank:05d}.json"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = None
