"""How much of the hardware a run uses: model FLOPs utilisation and memory.

MFU = tokens per second × FLOPs per token / (devices × peak FLOPs per second). Recomputation by activation
checkpointing is not counted as work: it is a cost, and lowers the figure.
"""

from __future__ import annotations

import re
import resource
import sys
import time

import torch
from torch import nn

from gecko.baselines import LlamaConfig, ModelConfig, meta_model
from gecko.train.run import Run

PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12,
    "L40S": 362e12, "A40": 150e12, "RTX 4090": 165e12, "V100": 125e12,
}  # fmt: skip
"""Dense products a second in bfloat16 (V100: float16), by whole words of the device's name, the first that fits; of
the vendors' data sheets."""
_FORWARD_AND_BACKWARD = 3


def flops_per_token(config: ModelConfig, length: int) -> float:
    """FLOPs of training on one token of rows of ``length``, two for a multiplication and addition; backward costs
    twice forward.

    3 · (2 · numbers in matrices, without the embedding + 2 · (Z + V) · keys a query sees on average
    + 2 · n · Z · V / heads for the working memory), where n is 3 for the adaptive rule (read, correct, write) and
    2 for the linear one. In a Llama Z and V are the model's width, and a query sees half of its row. Norms, moving
    averages and all else element by element are not counted.
    """
    products = sum(layer.weight.numel() for layer in meta_model(config).modules() if isinstance(layer, nn.Linear))
    return _FORWARD_AND_BACKWARD * 2 * (products + _mixing_products(config, length))


def _mixing_products(config: ModelConfig, length: int) -> float:
    """Multiplications between tokens, for one of them."""
    if isinstance(config, LlamaConfig):
        return config.num_layers * 2 * config.model_dim * length / 2
    keys = {"chunk": 0.5, "sliding_window": 1.0, "sliding_chunk": 1.5}[config.attention] * config.chunk_size
    attention = config.num_layers * (config.key_dim + config.value_dim) * keys
    maps = {"adaptive": 3, "linear": 2, "none": 0}[config.memory]
    memory = config.num_layers * maps * config.key_dim * config.value_head_dim
    return attention + memory


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Products a second of one device: of the table for a known GPU, else by measuring a product of matrices."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        known = next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
        if known is not None:
            return known
    return _measured_flops(device, dtype)


def memory_gib(device: torch.device) -> float:
    """The most that this process has used so far: of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Speedometer:
    """Turns a run's tokens a second into MFU."""

    def __init__(self, run: Run, device: torch.device, devices: int) -> None:
        dtype = torch.bfloat16 if run.precision == "bfloat16" else torch.float32
        self._per_token = flops_per_token(run.model, run.sequence_length) / (devices * peak_flops(device, dtype))

    def utilisation(self, tokens_per_second: float) -> float:
        return tokens_per_second * self._per_token


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few tries, which take some hundredths of a second; on a slow GPU seconds."""
    size, products = _measured_work(device)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(4):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return products * 2 * size**3 / min(seconds)


def _measured_work(device: torch.device) -> tuple[int, int]:
    """Size of the matrices and number of their products: on a GPU so much that starting them takes no part of it."""
    return (8192, 4) if device.type == "cuda" else (768, 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
