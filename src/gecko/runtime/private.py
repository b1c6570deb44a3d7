"""Private functions of PyTorch that have no public equal, each with a fallback for versions that lack it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from types import ModuleType
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
backward_pass = _private("_C._current_graph_task_id", lambda: -1)
"""() to the number of the backward pass that this thread runs; −1 if there is none."""
has_bfloat16_products = _private("cpu._is_avx512_bf16_supported", lambda: False)
"""() to whether the processor has AVX-512's bfloat16 products."""
has_bfloat16_tiles = _private("cpu._is_amx_tile_supported", lambda: False)
"""() to whether the processor has matrix tiles (AMX)."""


def _softmax_gradient(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return ((grad - (grad * y).sum(dim, keepdim=True)) * y).to(dtype)


softmax_gradient = _private("_softmax_backward_data", _softmax_gradient)
"""(gradient of y, y, dim, dtype) to the gradient of x, for y = softmax(x, dim)."""


def recorded_collectives() -> bytes:
    """Return the last collectives of this process, as Flight Recorder pickles them; empty if PyTorch cannot."""
    collectives = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # a PyTorch for CUDA has both; the second has gloo's alone
        dump = getattr(collectives, name, None)
        if dump is not None:
            return bytes(dump())
    return b""


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


# Fake tensors and the process group without communication have no public names yet. Only ``gecko plan --verify`` needs
# them, so they are imported where they are used, and there is no fallback.


def fake_tensors() -> ModuleType:
    """Return PyTorch's module of fake tensors: ``FakeTensor``, ``FakeTensorMode``, ``unset_fake_temporarily``."""
    return _module("torch._subclasses.fake_tensor")


def active_fake_mode() -> Any:
    """Return the mode in which new tensors are fake; None if they are real."""
    return _module("torch._guards").active_fake_mode()


def fake_store() -> Any:
    """Register the backend ``fake`` of process groups, which does not communicate, and return a store for it."""
    return _module("torch.testing._internal.distributed.fake_pg").FakeStore()


def forget_meshes() -> None:
    """Clear DTensor's caches, which hold process groups that may have been destroyed since."""
    _module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    _module("torch.distributed.tensor._redistribute").clear_redistribute_planner_cache()


def group_of_collective(operation: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the process group of an operation of the namespaces ``c10d`` and ``_c10d_functional``."""
    collectives = _module("torch.distributed._tools.fake_collectives")
    return collectives.CollectiveOp.get_process_group(operation, arguments)


@cache
def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"a dry run needs {name}, which PyTorch {torch.__version__} does not have. "
            "Try the newest PyTorch that this version of Gecko was tested with."
        ) from error
