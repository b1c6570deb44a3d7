"""Copies between host and device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on ``device``; the host does not wait for work that the device has queued.

    For CUDA the copy starts from pinned memory: the driver may wait for the device before it reads other memory.
    """
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """Values of a tensor of a device on their way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda" and torch.cuda.is_available()
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu, device="cpu")
        self._values.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the tensor on the host, as soon as the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
