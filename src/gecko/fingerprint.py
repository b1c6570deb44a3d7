"""A short name of weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from gecko.quantize import plain_tensors


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits: a hash over the sums of every parameter's rows, in which each number has its part."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        for tensor in plain_tensors(parameter):
            digest.update(_sums_of_rows(tensor.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _sums_of_rows(tensor: Tensor) -> Tensor:
    """Of a matrix; of a vector its numbers. Sums of bits as integers: the same in any order, as on any device, and at
    the speed of memory, where a hash of all bytes would take half a minute for a large model."""
    numbers = tensor if tensor.dtype == torch.float64 else tensor.float()
    rows = len(tensor) if tensor.dim() > 1 else tensor.numel()
    return numbers.reshape(rows, -1).view(torch.int32).sum(1, dtype=torch.int32)
