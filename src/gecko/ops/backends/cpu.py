"""Load and call the C kernels of all operators, and choose between PyTorch's two libraries for linear layers.

**Files.** The kernels of an operator are in ``ops/NAME/cpu*.c``, their ``CFunction`` in ``ops/NAME/__init__.py`` or
``cpu.py``, and code shared by the C files in ``ops/backends/*.h``. They need contiguous float32 tensors on the CPU.

**Threads** are PyTorch's: its OpenMP runtime is in the process before the library, which uses the same one. Work is
divided by shape and not by the number of threads, and sums have a fixed order: results are the same on any number of
cores.

**Memory.** A kernel allocates its own work memory: a few megabytes, and up to a hundred for the widest layers. It
returns 0, or the number of bytes that the system refused; ``call`` raises MemoryError in that case. The outputs must
then not be used; the same call can be repeated.

**Linear layers.** For float32 on a CPU, PyTorch uses MKL, which does not use AVX-512 on AMD processors. oneDNN, which
PyTorch also contains, takes half as long there. C kernels with packed weights (``cpu_panels.h``) run if a core's cache
holds the weights.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.cpu_library import Name, built, sources
from gecko.ops.backends.dispatch import (
    CPU_KERNEL_WIDTH,
    PLAIN,
    cpu_kernels_run_on,
    is_plain_float32,
    products_are_rounded,
)
from gecko.ops.backends.first_order import FirstOrder
from gecko.runtime.private import onednn_linear
from gecko.runtime.process import processor_field


def library(name: Name = "operators") -> ctypes.CDLL | None:
    """Return a library, building it if necessary; None, with one line in the log, if it cannot be built."""
    return _loaded(name)[0]


def missing() -> str:
    """Return the reason why the operators' library could not be built; empty if it was."""
    return _loaded("operators")[1]


def multiplies_bfloat16() -> bool:
    """Return whether the library has bfloat16 products, which both processor and compiler must support."""
    loaded = library()
    return loaded is not None and ctypes.c_int.in_dll(loaded, "projections_of_pairs").value == 1


@cache
def _loaded(name: Name) -> tuple[ctypes.CDLL | None, str]:
    try:
        return ctypes.CDLL(str(built(name))), ""
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[0]} failed: {error.stderr.strip()[-300:]}"
    except OSError as error:
        reason = str(error)
    _warn(reason)
    return None, reason


@cache
def _warn(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "the CPU runs operators without their C kernels, which is slower: %s. Install GCC to get them.", reason
    )


def address(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None, page_bytes: int = 0
) -> int:
    """Return the address of a tensor that C reads or writes. All tensors pass here on their way to C.

    Args:
        shape: None: the caller knows that the shape is right.
        page_bytes: bytes from one row to the next where rows lie in pages; 0: they lie side by side.

    Raises:
        ValueError: it is not a plain tensor on the CPU of this dtype and shape, or not in this order in memory.
    """
    paged = page_bytes != 0 and tensor.dim() > 0 and tensor.stride(0) * tensor.itemsize == page_bytes
    if (
        type(tensor) not in PLAIN or not tensor.is_cpu or tensor.dtype is not dtype or tensor.is_neg()
        or (shape is not None and tensor.shape != shape)
        or not (tensor[0] if paged else tensor).is_contiguous() or paged != bool(page_bytes)
    ):  # fmt: skip
        raise ValueError(
            f"for {name}, C kernels need a plain, contiguous {dtype} tensor on the CPU"
            f"{'' if shape is None else f' of shape {shape}'}; got a {type(tensor).__name__} of {tensor.dtype} on "
            f"{tensor.device} of shape {tuple(tensor.shape)}, strides {tensor.stride()}."
        )
    return tensor.data_ptr()


Argument = Tensor | tuple[Tensor | None, ...] | int | float | None


def call(name: str, *arguments: Argument) -> None:
    """Call one kernel.

    Tensors are passed as pointers, tuples as arrays of pointers, integers as int64 and other numbers as float. The
    number of threads follows as the last argument.

    Raises:
        MemoryError: the system refused the work memory of the kernel. The outputs are not valid then.
        ValueError: a tensor is not what the kernel declares; see ``address``.
    """
    function, dtypes = _functions.get(name) or _prepared(name, arguments)
    kinds = iter(dtypes)
    given = [x if isinstance(x, int | float) else _pointer(name, x, next(kinds)) for x in arguments]
    refused = function(*given, torch.get_num_threads())
    if refused:
        raise MemoryError(
            f"the kernel {name} needs {refused:,} bytes to work in; the system refused them. "
            "Try a smaller batch or shorter pieces of text, fewer threads, or end other programs."
        )


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for ``saved``."""
    ctx.save_for_backward(*tensors)
    ctx.saved_shapes = [None if x is None else x.shape for x in tensors]


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return what ``save`` saved, for kernels that know the sizes: a user's hook on saved tensors may return others.

    Raises:
        ValueError: a hook returned a tensor of another shape.
    """
    tensors = ctx.saved_tensors  # calls the hooks
    for tensor, shape in zip(tensors, ctx.saved_shapes, strict=True):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"a hook on saved tensors must return shape {tuple(shape)}; got {tuple(tensor.shape)}.")
    return tuple(x if x is None else x.contiguous() for x in tensors)


def parts(steps: int, least: int) -> int:
    """Return the number of parts, of at least ``least`` steps and 64 at most, that each sum the gradients of weights.

    It is independent of the number of threads, and so are the sums.
    """
    return min(64, -(-steps // least))


class CFunction(FirstOrder):
    """An operator in C. Its ``forward`` saves by ``save`` what its ``backward`` reads by ``saved``; that receives
    gradients as C reads them."""

    def __init_subclass__(cls) -> None:
        backward = cls.backward

        def laid_out(ctx: Any, *grads: Tensor | None) -> Any:
            return backward(ctx, *(x if x is None else x.resolve_neg().contiguous() for x in grads))

        cls.backward = staticmethod(laid_out)  # type: ignore[method-assign]
        super().__init_subclass__()

    @classmethod
    def run(cls, *arguments: Any) -> Any:
        """Compute the operator for contiguous copies of tensors. Autograd takes as long as a small kernel, so it is
        left out where gradients are disabled."""
        given = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
        return cls.apply(*given) if torch.is_grad_enabled() else cls.forward(_KeepsNothing(), *given)


class _KeepsNothing:
    """The context of a forward pass without a backward pass."""

    needs_input_grad = ()

    def save_for_backward(self, *_: Any) -> None:
        pass

    set_materialize_grads = mark_non_differentiable = save_for_backward


_functions: dict[str, tuple[Any, list[torch.dtype]]] = {}
"""Functions with their argument types set, which would take longer than the call, and the dtypes behind pointers."""


def _prepared(name: str, arguments: tuple[Argument, ...]) -> tuple[Any, list[torch.dtype]]:
    loaded = library()
    assert loaded is not None, "operators ask choose_backend first"
    function = getattr(loaded, name)
    function.argtypes = [*map(_kind, arguments), ctypes.c_int64]
    function.restype = ctypes.c_int64
    return _functions.setdefault(name, (function, _declared()[name]))


def _kind(argument: Argument) -> type:
    if isinstance(argument, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_void_p


_DTYPES = {
    "float": torch.float32, "double": torch.float64, "int32_t": torch.int32, "int64_t": torch.int64,
    "uint8_t": torch.uint8,
}  # fmt: skip


@cache
def _declared() -> dict[str, list[torch.dtype]]:
    """Return the dtypes of the tensors that each kernel takes, in order, as C declares them."""
    code = "".join(path.read_text(encoding="utf-8") for path in sources("operators"))
    kernels = re.findall(r"^int64_t (\w+)\((.*?)\) {", code, re.MULTILINE | re.DOTALL)
    return {name: [_DTYPES[x] for x in re.findall(r"(float|double|\w+_t) \*", given)] for name, given in kernels}


def _pointer(name: str, argument: Argument, dtype: torch.dtype) -> Any:
    if isinstance(argument, Tensor):
        return address(name, argument, dtype)
    if isinstance(argument, tuple):
        return (ctypes.c_void_p * len(argument))(*(_pointer(name, x, dtype) for x in argument))
    return argument


for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN, and PyTorch above it, each keep 1,024 programs, one for each number of rows and shape of a weight. One
    # takes 0.6 MB, and 0.6 ms to make: prompts of many lengths would fill 600 MB.
    os.environ.setdefault(_variable, "128")
_FEWEST_MULTIPLICATIONS = 2**20
"""Below this, the setup of oneDNN takes longer than its products save."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias like ``F.linear``: x (…, inputs), weight (outputs, inputs), bias (outputs,)."""
    large = x.numel() * len(weight) >= _FEWEST_MULTIPLICATIONS and not torch.is_autocast_enabled("cpu")
    if large and is_plain_float32(x, weight, bias) and onednn_is_faster():
        return (_OneDNNLinear.apply if torch.is_grad_enabled() else _onednn)(x, weight, bias)
    return F.linear(x, weight, bias)


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN uses wider registers of this processor than MKL: AVX-512 on AMD."""
    there = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return there and processor_field("vendor_id") == "AuthenticAMD"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    return onednn_linear(x, weight, bias)


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if ctx.needs_input_grad[0] else None)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else linear(grad, weight.t()),
            None if x is None else linear(rows.t(), x.reshape(-1, x.shape[-1]).t()),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


_MOST_WEIGHTS = 2**17
"""Most weights of one layer for the C kernels. With more, products are most of the work, and MKL's are as fast."""
_MOST_ON_AMD = 2**19
"""The same on AMD processors, where MKL is slower."""
_FEWEST_TOKENS = 1536
"""Fewest tokens of a call for the C kernels. With fewer, packing the weights takes longer than it saves."""
_SMALL = 2**15
"""Most weights of a layer that are packed in a few microseconds."""
_FEWEST_OF_SMALL = 32
"""Fewest tokens if all layers are small, on AMD processors: there a call of oneDNN takes longer than packing."""


def packed_weights_run_on(
    x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor | None] = (), fills_outputs: bool = False
) -> bool:
    """Return whether C kernels with packed weights support x (…, inputs) and each weight (outputs, inputs).

    A kernel that ``fills_outputs`` up to whole registers supports any number of outputs.
    """
    fewest = min(_FEWEST_OF_SMALL, _FEWEST_TOKENS)
    # The rules on sizes come after ``cpu_kernels_run_on``, which is False while they are traced.
    if x.numel() < fewest * x.shape[-1] or not cpu_kernels_run_on(x, *weights, *others):
        return False
    if fills_outputs or not onednn_is_faster() or any(weight.numel() > _SMALL for weight in weights):
        fewest = _FEWEST_TOKENS
    rounded = torch.is_autocast_enabled("cpu") == products_are_rounded()
    return x.numel() >= fewest * x.shape[-1] and rounded and all(_fits(weight, fills_outputs) for weight in weights)


def _fits(weight: Tensor, fills_outputs: bool) -> bool:
    """Return whether sizes are multiples of the numbers, or pairs of them, that a register holds."""
    width = 2 * CPU_KERNEL_WIDTH if products_are_rounded() else CPU_KERNEL_WIDTH
    outputs, inputs = weight.shape
    most = _MOST_ON_AMD if onednn_is_faster() else _MOST_WEIGHTS
    return (fills_outputs or outputs % width == 0) and inputs % width == 0 and 0 < weight.numel() <= most
