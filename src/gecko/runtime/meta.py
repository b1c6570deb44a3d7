"""Modules on the device ``meta``, which have shapes and dtypes, but no memory for values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RANDOM = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_}


@contextmanager
def meta_device() -> Iterator[None]:
    """Create modules on the device ``meta``, and draw no random numbers.

    They would change nothing. But PyTorch imports its compiler to draw them on this device, which takes as long as the
    import of PyTorch itself.
    """
    with torch.device("meta"), _WithoutRandomNumbers():
        yield


class _WithoutRandomNumbers(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
