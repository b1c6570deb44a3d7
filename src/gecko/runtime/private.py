"""Private functions of PyTorch that have no public equal, each with a fallback for versions that lack it."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch


def _private(path: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.<path>``, or ``fallback`` if this version of PyTorch lacks it."""
    try:
        found: Callable[..., Any] = attrgetter(path)(torch)
    except AttributeError:
        return fallback
    return found


# The fallbacks of the first three say "yes": operators then keep to PyTorch's operations, which is slower but right.

tracing_state = _private("_C._get_tracing_state", lambda: True)
"""() to the state of ``torch.jit.trace``; None if nothing is traced."""

dispatch_modes = _private("_C._len_torch_dispatch_stack", lambda: 1)
"""() to the number of dispatch modes that intercept operations."""

function_transform = _private("_C._functorch.peek_interpreter_stack", lambda: True)
"""() to the transform of ``torch.func`` that runs; None if there is none."""

global_module_hooks = _private("nn.modules.module._has_any_global_hook", lambda: True)
"""() to whether a hook is registered for all modules."""

has_bfloat16_products = _private("cpu._is_avx512_bf16_supported", lambda: False)
"""() to whether the processor has AVX-512's bfloat16 products."""

has_bfloat16_tiles = _private("cpu._is_amx_tile_supported", lambda: False)
"""() to whether the processor has matrix tiles (AMX)."""


def _softmax_gradient(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return ((grad - (grad * y).sum(dim, keepdim=True)) * y).to(dtype)


softmax_gradient = _private("_softmax_backward_data", _softmax_gradient)
"""(gradient of y, y, dim, dtype) to the gradient of x, for y = softmax(x, dim)."""


def forward_mode_level() -> int:
    """Return the level of forward-mode differentiation; −1 if there is none."""
    return int(getattr(torch.autograd.forward_ad, "_current_level", 0))


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x weightᵀ + bias by oneDNN, or by PyTorch's own choice if this version has no such operator."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
    except AttributeError:
        return torch.nn.functional.linear(x, weight, bias)
    y: torch.Tensor = operator(x, weight, bias, "none", [], "")
    return y
