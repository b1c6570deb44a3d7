"""Linear layers with products in float8, by torchao's training path.

Each row of the inputs, of a weight and of the gradients is divided by a power of two and rounded to float8 (e4m3), for
all three products of a layer. Weights stay as they are, float32, and so do the optimizer's state and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gecko.models import LanguageModel
from gecko.runtime.process import require, without_log_warnings
from gecko.train.run import Precision

_NEEDED = (8, 9)
"""Compute capability of the first GPUs with float8 products."""
_MULTIPLE = 16
"""Products in float8 need matrices whose sizes are multiples of this."""


def check_float8(precision: Precision, device: torch.device) -> None:
    """Raise ValueError if ``precision`` is ``float8`` and the device has no float8 products, and ImportError if torchao
    is not installed."""
    if not precision.startswith("float8"):
        return
    _library()
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if precision == "float8" and (found is None or found < _NEEDED):
        what = str(device) if found is None else f"{device} with {found[0]}.{found[1]}"
        raise ValueError(
            f"precision=float8 needs a GPU of compute capability {_NEEDED[0]}.{_NEEDED[1]} or newer, as an H100; got "
            f"{what}. Try precision=bfloat16, or precision=float8_emulated, which rounds alike and is slow."
        )


def use_float8(model: LanguageModel, precision: Precision) -> None:
    """Replace the linear layers of blocks in place, whose sizes are multiples of 16, by layers that multiply in float8.

    The names of parameters and the parameters themselves do not change. Embedding, head and norms stay as they are.
    """
    if not precision.startswith("float8"):
        return
    library = _library()
    settings = library.Float8LinearConfig.from_recipe_name("rowwise")
    settings = replace(settings, emulate=precision == "float8_emulated")
    for block in model.blocks:
        library.convert_to_float8_training(block, config=settings, module_filter_fn=_is_divisible)


@contextmanager
def without_float8(model: LanguageModel, precision: Precision) -> Iterator[None]:
    """Context that undoes ``use_float8``: torchao's layers do not run under ``torch.inference_mode``."""
    kind: Any = _library().float8_linear.Float8Linear if precision.startswith("float8") else None
    changed = [] if kind is None else [module for module in model.modules() if type(module) is kind]
    try:
        for module in changed:
            module.__class__ = nn.Linear
        yield
    finally:
        for module in changed:
            module.__class__ = kind


def _is_divisible(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and all(size % _MULTIPLE == 0 for size in module.weight.shape)


def _library() -> Any:
    with without_log_warnings():
        return require("torchao.float8", "quantize")
