"""Nested, immutable records of tensors, copies for which the host does not wait, and memory: none, and the peak."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class TensorRecord:
    """Frozen dataclass whose fields are tensors, other records, tuples of records, or None."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with ``function`` applied to every tensor."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        changes = {name: map_tensors(getattr(self, name), function) for name in names}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def where(self, condition: Tensor, other: Self) -> Self:
        """Return this record in rows where ``condition`` (B,) holds, else ``other``. All tensors are batch first."""
        others = iter(other.tensors().values())
        return self.map(lambda x: torch.where(condition.view(-1, *[1] * (x.dim() - 1)), x, next(others)))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return every tensor by its dotted path."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            found.update(_collect(getattr(self, field.name), f"{prefix}{field.name}"))
        return found


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, a record, or a tuple of such, with ``function`` applied to every tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, TensorRecord):
        return value.map(function)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, function) for item in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a tensor, a record, or a tuple of such, in the order of ``map_tensors``."""
    return list(_collect(value, "").values())


def _collect(value: Any, path: str) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, TensorRecord):
        return value.tensors(f"{path}.")
    if isinstance(value, tuple):
        return {name: tensor for i, item in enumerate(value) for name, tensor in _collect(item, f"{path}.{i}").items()}
    return {}


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on ``device``; the host does not wait for work that the device has queued.

    For CUDA the copy starts from pinned memory: the driver may wait for the device before it reads other memory.
    Within ``without_copies`` it raises RuntimeError.
    """
    if _COPIES_FORBIDDEN and tensor.device.type == "cpu":
        raise RuntimeError("a captured step would copy what the host computed for one batch, and repeat it for others")
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and torch.cuda.is_available():
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


_COPIES_FORBIDDEN: list[None] = []


@contextmanager
def without_copies() -> Iterator[None]:
    """Context in which ``to_device`` refuses tensors of the host, in all threads: also those of a backward pass."""
    _COPIES_FORBIDDEN.append(None)
    try:
        yield
    finally:
        _COPIES_FORBIDDEN.pop()


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


_RANDOM = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_}


@contextmanager
def meta_device() -> Iterator[None]:
    """Create modules on the device ``meta``, and draw no random numbers: PyTorch would import its compiler to do so."""
    with torch.device("meta"), _WithoutRandomNumbers():
        yield


class _WithoutRandomNumbers(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs.get("tensor", *args[:1]) if func in _RANDOM else func(*args, **kwargs)


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far in GiB: of the GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
