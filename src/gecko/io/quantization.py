"""Weights in 8 or 4 bits: w ≈ s · q, with integers q and one scale s per row (8 bits) or per group of a row (4 bits).

Only the matrices in blocks, which are most of a large model, are quantised. Embedding, head, norms and CEMA keep their
dtype. torchao rounds and multiplies; this module selects the weights and defines their file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gecko.runtime.process import require, without_log_warnings

GROUP = 32
"""Consecutive weights of a row that share a scale in 4 bits."""
_KINDS = {8: "int8", 4: "int4"}


def quantize(model: nn.Module, bits: int) -> None:
    """Quantise the matrices of the model's blocks in place; the model is then for inference only.

    Raise ImportError if torchao is not installed, ValueError if ``bits`` is neither 8 nor 4, the model has no such
    matrices, their rows are single weights, the weights are float64 or already quantised, or ``GROUP`` does not divide
    the rows of a matrix in 4 bits.
    """
    if bits not in _KINDS:
        raise ValueError(f"bits must be 8 or 4; got {bits}.")
    matrices = {name: module for name, module in model.named_modules() if _is_matrix(module, name)}
    if not matrices:
        raise ValueError(
            f"the model must be a Gecko, with matrices in its blocks; got a {type(model).__name__} without them. "
            "For a model of gecko.hf try quantize(model.model.gecko, bits)."
        )
    for layer, module in matrices.items():
        name, weight = f"{layer}.weight", module.get_parameter("weight")
        if is_quantized(weight):
            raise ValueError(f"the model must not be quantised yet; {name} is. Quantise the model it was made from.")
        if weight.dtype == torch.float64:
            raise ValueError(f"weights must be float32, bfloat16 or float16; {name} is float64. Try model.float().")
        if weight.shape[1] == 1:
            raise ValueError(f"matrices must have rows of several weights; {name} has rows of 1. Do not quantise it.")
        if bits == 4 and weight.shape[1] % GROUP:
            raise ValueError(
                f"4 bits need rows of whole groups of {GROUP}; {name} has rows of {weight.shape[1]}. Try 8 bits."
            )
    with without_log_warnings():
        library = require("torchao.quantization", "quantize")
    if bits == 8:
        settings = library.Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        four = torch.int4  # type: ignore[attr-defined]
        settings = library.IntxWeightOnlyConfig(weight_dtype=four, granularity=library.PerGroup(GROUP))
    library.quantize_(model, settings, filter_fn=_is_matrix)


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is a tensor of torchao, without importing torchao."""
    return hasattr(weight, "qdata")


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """Return the plain tensors of a weight: its integers and scales if it is quantised, otherwise itself."""
    quantized: Any = weight
    return [quantized.qdata, quantized.scale] if is_quantized(weight) else [weight]


def pack(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as files store them: a quantised one as NAME.int8, or NAME.int4 (two per byte), and NAME.scale."""
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not is_quantized(weight):
            packed[name] = weight
            continue
        integers, packed[f"{name}.scale"] = plain_tensors(weight)
        if getattr(weight, "target_dtype", None) == torch.int4:  # type: ignore[attr-defined]
            shifted = (integers + 8).to(torch.uint8)
            packed[f"{name}.int4"] = shifted[:, ::2] | shifted[:, 1::2] << 4
        else:
            packed[f"{name}.int8"] = integers
    return packed


def stored_bits(packed: Mapping[str, Tensor]) -> int | None:
    """Return the bits of the quantised weights in a file; None if none is quantised."""
    return next((bits for bits, kind in _KINDS.items() if any(name.endswith(f".{kind}") for name in packed)), None)


def unpack(packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that ``pack`` packed; those that are quantised in ``like`` become quantised tensors."""
    weights = dict(packed)
    for name, blank in like.items():
        kind = next((kind for kind in _KINDS.values() if f"{name}.{kind}" in weights), None)
        if kind is not None and is_quantized(blank):
            integers = weights.pop(f"{name}.{kind}")
            if kind == "int4":  # the even columns are in the low halves of bytes, shifted by 8
                halves = torch.stack([integers & 15, integers >> 4], dim=-1)
                integers = halves.flatten(1).to(torch.int8) - 8
            weights[name] = _fill(blank, integers, weights.pop(f"{name}.scale"))
    return weights


def _is_matrix(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


def _fill(blank: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    """Return a quantised tensor like ``blank``, which may be on ``meta``, with these values; zero points are 0."""
    names, context = blank.__tensor_flatten__()  # type: ignore[attr-defined]
    zeros = {name: torch.zeros_like(getattr(blank, name), device=integers.device) for name in names}
    inner = zeros | {"qdata": integers, "scale": scale}
    filled: Tensor = type(blank).__tensor_unflatten__(inner, context, None, None)  # type: ignore[attr-defined]
    return filled
