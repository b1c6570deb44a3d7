"""The checks and dtype rules that every operator shares."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gecko.ops.kernels import products_are_rounded
from gecko.segments import Segments


def compute_dtype(x: Tensor) -> torch.dtype:
    """Statistics and states are float32, or float64 for float64 inputs: never the activation's 16 bits."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def linear_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer takes of x: autocast's dtype where that is on, but for kernels that round by themselves."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or (device == "cpu" and products_are_rounded()):
        return x.dtype
    return torch.get_autocast_dtype(device)


def from_linear(y: Tensor, x: Tensor) -> Tensor:
    """y, which PyTorch's linear layer gave for x, in the dtype of x if C kernels round by themselves."""
    return y.to(x.dtype) if products_are_rounded() else y


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """A context in which autocast does not touch an operator's own products: what may be 16 bits, it decides."""
    if not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_affine(weight: Tensor | None, bias: Tensor | None, features: int) -> None:
    if (weight is None) != (bias is None):
        given = "bias" if weight is None else "weight"
        raise ValueError(f"weight and bias must both be given, or neither; got a {given} only.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_shape(name, tensor, (features,))


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}; got {tuple(tensor.shape)}.")


def check_segments(segments: Segments, batch: int, length: int) -> None:
    if (segments.batch, segments.length) != (batch, length):
        raise ValueError(
            f"segments must be those of the call, {batch} rows of {length} tokens; "
            f"got {segments.batch} of {segments.length}."
        )
