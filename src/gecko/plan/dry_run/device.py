"""A GPU that computes nothing: operations on its tensors return tensors of the right shapes, without numbers.

Tensors on the host are real, so the layout of documents, the order of collectives and all choices of the code are those
of training. Tensors on the device are PyTorch's fake tensors. They say that they are on a GPU, so operators choose what
they choose there; for PyTorch they are on the CPU, because autograd of CUDA tensors needs a PyTorch that was built with
CUDA. A GPU is neither needed nor used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gecko.runtime.private import active_fake_mode, fake_tensors

DEVICE = torch.device("cpu")
"""Where tensors of the device are for PyTorch."""

_HOST_DTYPES = torch.int64, torch.int32, torch.int16, torch.bool
_READS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default


def is_on_device(x: Any) -> bool:
    """Return whether x is a tensor of the device."""
    return isinstance(x, fake_tensors().FakeTensor)


class Watcher(Protocol):
    """Sees each operation after it ran, on the host too."""

    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
        """``given`` are the tensors among the arguments, as they were before the operation."""


class FakeGPU(TorchDispatchMode):
    """The device, with the ``watchers`` of its operations.

    An operation runs on the device if one of its inputs is there, or if it creates floating-point numbers: what the
    host computes itself, layouts and positions, are integers. Tensors of the host are copied to the device when an
    operation there reads them.
    """

    def __init__(self, *watchers: Watcher) -> None:
        super().__init__()
        self._watchers = watchers
        self._module = fake_tensors()
        self._fakes = self._module.FakeTensorMode()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which code uses the device."""
        on_gpu = patch.object(self._module.FakeTensor, "is_cuda", True, create=True)
        capability = patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # broadcasts ask for it
        with ExitStack() as stack:
            for context in (self._fakes, on_gpu, capability, self):
                stack.enter_context(context)
            yield

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes with its local tensors, which come here
        if active_fake_mode() is not self._fakes:
            return operation(*arguments, **options)  # DTensor asks for a shape
        given = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
        result = self._computed(operation, arguments, options, given)
        for watcher in self._watchers:
            watcher.see(operation, arguments, given, result)
        return result

    def _computed(
        self, operation: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], given: list[Tensor]
    ) -> Any:
        if any(map(is_on_device, given)):
            if operation in _READS:
                return 1.0 if arguments[0].is_floating_point() else 1  # losses and norms are finite
            return self._on_device(operation, arguments, options, given)
        device = options.get("device")
        if device is not None and device.type != "meta" and all(x.is_meta for x in given):
            created = self._on_device(operation, arguments, options, given)
            if created.dtype not in _HOST_DTYPES:
                return created
        with self._module.unset_fake_temporarily():
            return operation(*arguments, **options)

    def _on_device(
        self, operation: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], given: list[Tensor]
    ) -> Any:
        if not all(map(is_on_device, given)):
            arguments, options = tree_map_only(Tensor, self._placed, (arguments, options))
        return operation(*arguments, **options)

    def _placed(self, x: Tensor) -> Tensor:
        return x if is_on_device(x) else self._fakes.from_tensor(x, static_shapes=True)
