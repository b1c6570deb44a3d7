"""An emulated device, which shows where the host would wait for a GPU.

Its tensors say that they are on ``meta`` and hold their values on the CPU. Operations run as on a GPU without Triton:
in PyTorch's operations, with every value. The mode records what makes the host wait for a GPU's queue.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
"""Operations whose outputs' sizes depend on values: a GPU computes the size and the host reads it."""


class Held(Tensor):
    """Tensor of the emulated device; ``values`` is on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Held:
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} must run within EmulatedDevice")


class EmulatedDevice(TorchDispatchMode):
    """Mode that computes on the emulated device, and lists in ``waits`` what the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies_to_host = 0
        """Copies to the host that it does not wait for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        here = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Held)]
        created = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE.type
        self._record(function, args, kwargs, here, created)
        to_host = kwargs.get("device") is not None and not created
        if created:
            kwargs["device"] = torch.device("cpu")
        wrappers = {id(x.values): x for x in here}
        out = function(*tree_map(_values, args), **tree_map(_values, kwargs))
        on_device = (bool(here) or created) and not to_host and not _writes_to_host(function, args)
        return tree_map(lambda x: wrappers[id(x)] if id(x) in wrappers else _held(x), out) if on_device else out

    def _record(self, function: Any, args: Any, kwargs: Any, here: list[Held], created: bool) -> None:
        name = function._schema.name.removeprefix("aten::")
        if here and name == "_local_scalar_dense":
            self.waits.append("the host reads a number")
        if here and (name in SIZED_BY_VALUES or (name.startswith("index") and _has_mask(args))):
            self.waits.append(f"the host reads the size of the result of {name}")
        if name == "_to_copy" and kwargs.get("device") is not None:
            self._record_copy(bool(here), created, waits=not kwargs.get("non_blocking", False))
        # A number of the host is an argument of a kernel.
        if name == "copy_" and here and args[1].dim():
            self._record_copy(isinstance(args[1], Held), isinstance(args[0], Held), waits=not any(args[2:]))

    def _record_copy(self, from_device: bool, to_device: bool, *, waits: bool) -> None:
        if from_device and not to_device:
            self.copies_to_host += 1
            self.waits += ["a copy to the host"] * waits
        if to_device and not from_device:
            self.waits += ["a copy to the device"] * waits


def _writes_to_host(function: Any, args: Any) -> bool:
    return function is torch.ops.aten.copy_.default and not isinstance(args[0], Held)


def _has_mask(args: Any) -> bool:
    return any(isinstance(x, Held) and x.dtype is torch.bool and x.dim() for x in tree_leaves(args[1:2]))


def _values(x: Any) -> Any:
    if isinstance(x, Held):
        return x.values
    if isinstance(x, Tensor) and x.device == DEVICE:
        raise AssertionError("a tensor was made on the device from numbers of the host, which waits for the copy")
    return x


def _held(x: Any) -> Any:
    # The wrapper has no conjugate bit.
    return Held(x.resolve_conj().resolve_neg()) if isinstance(x, Tensor) else x


def move(model: nn.Module) -> None:
    """Move the parameters of a model to the emulated device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Held(parameter.detach())))
