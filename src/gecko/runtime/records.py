"""Nested, immutable records of tensors: the base class of states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor


class TensorRecord:
    """Frozen dataclass whose fields are tensors, other records, tuples of records, or None."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with ``function`` applied to every tensor."""
        changes = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            changes[field.name] = map_tensors(getattr(self, field.name), function)
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
