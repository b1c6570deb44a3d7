"""Checks of the tensors that were read from a file, against those that its config asks for.

C and Triton read weights and states by address: they would misread a tensor of another shape or dtype, or crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

REMEDY = "Restore it from a copy, or write it again."
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which files may store what is computed in any of them."""


def fitted(source: object, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file in the dtypes of ``like``, which has every name, shape and dtype that it must have.
    Errors are those of ``check_layout``; a value that is not finite is a ValueError."""
    check_layout(source, tensors, like)
    check_finite(source, tensors)
    return {name: tensors[name].to(expected.dtype) for name, expected in like.items()}


def check_layout(source: object, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor is missing, unknown, or of another shape or kind of dtype than in ``like``.

    The message names the file ``source``, the tensor, and what was expected and found.
    """
    for name in (*like, *tensors):
        expected, found = like.get(name), tensors.get(name)
        if expected is None or found is None or expected.shape != found.shape or not _alike(expected, found):
            raise ValueError(
                f"{source} must hold the tensors of its config; {name} must be {_described(expected)}, "
                f"and is {_described(found)}. {REMEDY}"
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError, which names the file, in place of what safetensors raises for a damaged one."""
    try:
        yield
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a complete safetensors file; it is not: {error}. {REMEDY}") from error


def float_dtype(tensor: Tensor | None, default: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype of a tensor that files may store; ``default`` for another one, which ``fitted`` then refuses."""
    return tensor.dtype if tensor is not None and tensor.dtype in FLOATS else default


def check_finite(source: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor holds NaN or an infinity: nothing that is computed with it is a number."""
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point() and tensor.numel() > 0
        if floating and not all(math.isfinite(x) for x in tensor.detach().aminmax()):
            raise ValueError(f"{source} must hold finite numbers; {name} has NaN or infinite ones. Use an older copy.")


def _alike(expected: Tensor, found: Tensor) -> bool:
    return found.dtype in FLOATS if expected.is_floating_point() else found.dtype == expected.dtype


def _described(tensor: Tensor | None) -> str:
    dtype = "absent" if tensor is None else str(tensor.dtype).removeprefix("torch.")
    return dtype if tensor is None else f"{dtype} of shape {tuple(tensor.shape)}"
