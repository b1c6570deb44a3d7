"""Memory of a device over a step: every allocation and release, in order, and what the memory was used for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gecko.plan.dry_run.device import is_on_device

UNIT = 512
"""Bytes that PyTorch's allocator for CUDA rounds a size up to."""

PARAMETERS, GRADIENTS, OPTIMIZER = OWNED = "parameters", "gradients", "optimizer"
KEPT, WORK, LOSS = "activations kept", "block in progress", "logits and loss"
COMMUNICATION, CARRIED, OTHER = "communication buffers", "carried states", "other"
_COMMUNICATION = "c10d", "_c10d_functional", "fsdp"
"""Namespaces of the operations on communication buffers."""


@dataclass(frozen=True)
class Peak:
    """The largest number of bytes that were allocated at one time."""

    total: int
    uses: dict[str, int]
    """Bytes at that time, by use."""
    moment: str
    """Part of the step."""


class MemoryLedger:
    """Allocations and releases of the memory of fake tensors. ``recording`` is the context of the step.

    What memory is used for may become known after it was allocated, so peaks are computed in the end.
    """

    def __init__(self) -> None:
        self.use = OTHER
        """Use of memory that is allocated from now on; ``mark`` changes it."""
        self.moment = ""
        """Name of the present part of the step."""
        self._changes: list[tuple[int, int, str]] = []
        self._uses: list[str] = []
        self._begin = 0
        self._alive: dict[int, tuple[int, int, Any]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which memory may be resized, as FSDP does to free gathered parameters; that is no operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._update(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
        results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        tensors = [x for x in (*given, *results) if is_on_device(x)]
        for x in tensors:
            self._number(x)
        if operation.namespace in _COMMUNICATION:
            self.mark((x for x in tensors if self._uses[self._number(x)] not in OWNED), COMMUNICATION)

    def mark(self, tensors: Iterable[Any], use: str) -> None:
        """Set what the memory of the fake tensors among ``tensors`` is used for."""
        for x in tensors:
            if is_on_device(x):
                self._uses[self._number(x)] = use

    def relabel(self, before: str, after: str) -> None:
        """Change the use of the memory that is in use for ``before`` now."""
        for number, _, _ in self._alive.values():
            if self._uses[number] == before:
                self._uses[number] = after

    def restart(self) -> None:
        """Begin a measurement: ``peak`` is that of later moments."""
        self._begin = len(self._changes)

    @property
    def in_use(self) -> int:
        """Bytes in use now."""
        return sum(size for _, size, _ in self._alive.values())

    def peak(self, moment: str | None = None) -> Peak:
        """Return the peak since ``restart``, or since the ledger was made; with ``moment``, that of this part."""
        total = most = end = 0
        for i, (_, change, now) in enumerate(self._changes):
            total += change
            if total > most and i >= self._begin and moment in (None, now):
                most, end = total, i + 1
        uses: dict[str, int] = dict.fromkeys(self._uses, 0)
        for number, change, _ in self._changes[:end]:
            uses[self._uses[number]] += change
        moment = self._changes[end - 1][2] if end else ""
        return Peak(most, {use: size for use, size in uses.items() if size}, moment)

    def _number(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._uses.append(self.use)
            self._alive[key] = len(self._uses) - 1, 0, weakref.ref(storage, partial(self._freed, key))
        self._update(storage)
        return self._alive[key][0]

    def _update(self, storage: torch.UntypedStorage) -> None:
        if (known := self._alive.get(storage._cdata)) is None:
            return
        number, before, reference = known
        size = -(-storage.nbytes() // UNIT) * UNIT
        if size != before:
            self._changes.append((number, size - before, self.moment))
            self._alive[storage._cdata] = number, size, reference

    def _freed(self, key: int, _: Any) -> None:
        number, size, _ = self._alive.pop(key)
        self._changes.append((number, -size, self.moment))
