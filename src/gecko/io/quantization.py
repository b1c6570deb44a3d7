"""Weights in 8 or 4 bits: w ≈ s · q, with integers q and one scale s for a row (8), or for a group of a row (4).

Only the matrices inside the blocks, which are nearly all of a large model: embedding, head, norms and the moving
average stay as they are. torchao rounds and multiplies; what is here says which weights, and how a file holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gecko.extras import require

GROUP = 32
"""Neighbours in a row that share a scale in 4 bits."""
_KINDS = {8: "int8", 4: "int4"}


def quantize(model: nn.Module, bits: int) -> None:
    """Round the matrices of the model's blocks, in place; from then on it is for inference only.

    Raises:
        ImportError: torchao is not installed.
        ValueError: ``bits`` is neither 8 nor 4; the model has no such matrices; the weights are 64 bits wide or
            quantised already; 4 bits, and the rows of a matrix are not made of whole groups of ``GROUP``.
    """
    if bits not in _KINDS:
        raise ValueError(f"bits must be 8 or 4; got {bits}.")
    matrices = {name: module for name, module in model.named_modules() if _is_matrix(module, name)}
    if not matrices:
        raise ValueError(
            f"the model must be a Gecko, with matrices in its blocks; got a {type(model).__name__} without them. "
            "For a model of transformers try quantize(model.model.gecko, bits)."
        )
    for name, module in matrices.items():
        _check(f"{name}.weight", module.get_parameter("weight"), bits)
    with _without_warnings():
        library = require("torchao.quantization", "quantize")
    library.quantize_(model, _settings(library, bits), filter_fn=_is_matrix)


def is_quantized(weight: Tensor) -> bool:
    """Whether this is one of torchao's tensors; asked without importing it."""
    return hasattr(weight, "qdata")


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """What a weight consists of: itself, or its integers and scales."""
    quantized: Any = weight
    return [quantized.qdata, quantized.scale] if is_quantized(weight) else [weight]


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as a file holds them: a quantised one is NAME.int8, or NAME.int4 with two to a byte, and NAME.scale."""
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not is_quantized(weight):
            packed[name] = weight
            continue
        integers, packed[f"{name}.scale"] = plain_tensors(weight)
        if getattr(weight, "target_dtype", None) == torch.int4:  # type: ignore[attr-defined]
            packed[f"{name}.int4"] = _join_halves(integers)
        else:
            packed[f"{name}.int8"] = integers
    return packed


def stored_bits(packed: Mapping[str, Tensor]) -> int | None:
    """Bits of the quantised weights among those of a file; None where there are none."""
    return next((bits for bits, kind in _KINDS.items() if any(name.endswith(f".{kind}") for name in packed)), None)


def unpack(packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that ``pack`` took apart; those that ``like`` has quantised become such, the rest stays as it is.

    Raises:
        ValueError: integers are there without their scales.
    """
    weights = dict(packed)
    for name, blank in like.items():
        kind = next((kind for kind in _KINDS.values() if f"{name}.{kind}" in weights), None)
        if kind is not None and is_quantized(blank):
            if f"{name}.scale" not in weights:
                raise ValueError(f"quantised weights must come with their scales; the file lacks {name}.scale.")
            integers = weights.pop(f"{name}.{kind}")
            integers = _split_halves(integers) if kind == "int4" else integers
            weights[name] = _fill(blank, integers, weights.pop(f"{name}.scale"))
    return weights


def _is_matrix(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


def _check(name: str, weight: Tensor, bits: int) -> None:
    if is_quantized(weight):
        raise ValueError(f"the model must not be quantised yet; {name} is. Quantise the model it was made from.")
    if weight.dtype == torch.float64:
        raise ValueError(f"weights must be float32, bfloat16 or float16; {name} is float64. Try model.float().")
    if bits == 4 and weight.shape[1] % GROUP:
        raise ValueError(
            f"4 bits need rows of whole groups of {GROUP}; {name} has rows of {weight.shape[1]}. Try 8 bits."
        )


def _settings(library: Any, bits: int) -> Any:
    if bits == 8:
        return library.Int8WeightOnlyConfig(set_inductor_config=False)
    four = torch.int4  # type: ignore[attr-defined]
    return library.IntxWeightOnlyConfig(weight_dtype=four, granularity=library.PerGroup(GROUP))


def _fill(blank: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    """A quantised tensor like ``blank``, which may be without memory, with these numbers; zero points are all 0."""
    names, context = blank.__tensor_flatten__()  # type: ignore[attr-defined]
    zeros = {name: torch.zeros_like(getattr(blank, name), device=integers.device) for name in names}
    inner = zeros | {"qdata": integers, "scale": scale}
    filled: Tensor = type(blank).__tensor_unflatten__(inner, context, None, None)  # type: ignore[attr-defined]
    return filled


def _join_halves(integers: Tensor) -> Tensor:
    """(N, K) of −8 … 7 to (N, K / 2) bytes, the even columns in the low halves."""
    shifted = (integers + 8).to(torch.uint8)
    return shifted[:, ::2] | shifted[:, 1::2] << 4


def _split_halves(joined: Tensor) -> Tensor:
    return torch.stack([joined & 15, joined >> 4], dim=-1).flatten(1).to(torch.int8) - 8


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torchao logs warnings on import, of GPU libraries that a CPU has no use for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
