"""Choice of a backend for each operator call, and the conventions of the kernels.

**Backends.** Each operator has up to three implementations: Triton kernels in ``ops/NAME/triton.py`` (and
``triton_*.py`` if one file is too long), C kernels in ``ops/NAME/cpu.c``, which ``ops/NAME/__init__.py`` or ``cpu.py``
calls, and an eager form made of PyTorch's operations. ``choose_backend`` selects one per call. Modules with Triton
kernels are imported by the function that calls them, so the package does not import Triton. ``gecko.hf.export`` copies
no kernels: exported code runs the eager forms. These also serve float64 and all other cases that a kernel leaves out.

**Layers of a Triton operator.** A ``@triton.jit`` function is the kernel. A plain function allocates outputs with
``torch.empty``, builds one ``Launch`` per kernel and runs it. ``@custom_op("NAME")`` makes it an operator, with a
backward pass that calls another one. The function is its own fake: without values nothing is launched. Custom ops take
and return tensors and numbers only, and never return an input.

**Names.** ``p_`` pointer, ``b_`` tile in registers, ``i_`` index or offsets, ``m_`` mask. Sizes are words
(``length``, ``channels``); those that kernels unroll are ``tl.constexpr``.

**Numbers.** Upcast every load to float32 before arithmetic (the interpreter's bfloat16 arithmetic is wrong), and
downcast on the store only. ``tl.dot`` adds in float32. For float32 inputs its operands are float32 with
``input_precision="ieee"`` or "tf32x3". Operands are bfloat16 only if the input itself is. Plain "tf32" does not
round: tensor cores drop the low 13 bits of float32 factors, so kernels round the factors first.

**Constants.** Write ``if``/``else`` and one ``return`` at the end. After a ``return`` inside ``if CONSTEXPR:`` Triton
still compiles the rest of the function, where a pointer may be None.

**Offsets.** A product of a position, a row or a chunk with a stride is int64: make the index int64 first
(``tl.program_id(0).to(tl.int64)``). The first axis of the grid is the one that grows with the text: the others are
limited to 65,535 programs.

**Configurations.** One function per operator chooses tiles, warps and stages by shape and dtype, from a few fixed
sets. There is no autotuning, and no recompilation when the length changes: pass lengths as arguments named in
``do_not_specialize``.

**Custom operators.** The compiler, and code that traces, counts or transforms PyTorch's operations, sees what
``torch.library.custom_op`` registers. The dispatcher costs 50 % more host time per block (``benchmarks/host.py``), so
calls that are not watched bypass it and are differentiated by a ``torch.autograd.Function``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from gecko.ops.backends.first_order import FirstOrder
from gecko.runtime.private import dispatch_modes, forward_mode_level, function_transform, tracing_state

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels support."""


def on_gpu(x: Tensor) -> bool:
    """Return whether ``x`` is on a GPU, for choices that do not depend on Triton."""
    return x.is_cuda


def triton_kernels_run_on(x: Tensor) -> bool:
    """Return whether Triton kernels support ``x``: it is on a GPU, in at most 32 bits, and Triton is installed."""
    return on_gpu(x) and x.dtype in DTYPES and triton_kernels_installed()


def cpu_kernels_run_on(*tensors: Tensor | None) -> bool:
    """Return whether ``tensors`` are what C kernels read (``is_plain_float32``) and the C library is built."""
    return is_plain_float32(*tensors) and _cpu_kernels_installed()


Backend = Literal["triton", "cpu", "eager"]


def choose_backend(x: Tensor, *others: Tensor | None, triton: bool = True, cpu: bool = True) -> Backend:
    """Return the backend for one call of an operator, whose other floating-point inputs are ``others``.

    It is the first of "triton", if ``triton_kernels_run_on(x)``, "cpu", if ``cpu_kernels_run_on`` all inputs, and
    "eager", for which ``triton`` and ``cpu`` do not say that its kernels leave out the sizes or options of this call.
    """
    if triton and triton_kernels_run_on(x):
        return "triton"
    if cpu and cpu_kernels_run_on(x, *others):
        return "cpu"
    return "eager"


def gpu_functions_run_on(*tensors: Tensor | None) -> bool:
    """Return whether PyTorch's operations on ``tensors`` may be an autograd function with hand-written gradients.

    Gradients must be wanted, operations not watched, and all but None plain tensors that Triton kernels support.
    """
    if is_watched() or not torch.is_grad_enabled():
        return False
    return all(t is None or (type(t) in PLAIN and triton_kernels_run_on(t)) for t in tensors)


def is_plain_float32(*tensors: Tensor | None) -> bool:
    """Return whether all ``tensors`` but None are plain float32 on the CPU and operations are not watched."""
    return not is_watched() and all(map(_is_plain, tensors))


def products_are_rounded() -> bool:
    """Return whether C kernels round the operands of products to bfloat16 and keep everything else float32.

    They do so under autocast to bfloat16 on the CPU, if the processor has bfloat16 products.
    """
    wanted = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return wanted and not is_watched() and _cpu_kernels_installed() and _cpu_kernels_round()


CPU_KERNEL_WIDTH = 16
"""Numbers in the widest register: C kernels with matrix products need multiples of it as features per head."""

PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor classes that kernels support; other subclasses may hold shapes, shards or packed numbers."""


def _is_plain(x: Tensor | None) -> bool:
    if x is None:
        return True
    # Autograd functions cannot save inference tensors. The memory of a negative view holds the opposite numbers.
    kept = not x.is_inference() or torch.is_inference_mode_enabled()
    plain = type(x) in PLAIN and x.is_cpu and x.dtype == torch.float32
    return plain and kept and not x.is_neg() and not x._is_zerotensor()


def is_watched() -> bool:
    """Return whether code outside needs to see PyTorch's operations.

    It does while they are compiled, traced, intercepted by a dispatch mode (counted, selectively recomputed),
    transformed by ``torch.func`` or differentiated in forward mode.
    """
    return (
        torch.compiler.is_compiling()
        or tracing_state() is not None
        or dispatch_modes() > 0
        or function_transform() is not None
        or forward_mode_level() >= 0
    )


@cache
def _cpu_kernels_installed() -> bool:
    return is_package() and importlib.import_module("gecko.ops.backends.cpu").library() is not None


@cache
def _cpu_kernels_round() -> bool:
    return bool(importlib.import_module("gecko.ops.backends.cpu").multiplies_bfloat16())


@cache
def triton_kernels_installed() -> bool:
    """Return whether Triton is installed and this is the package that has the kernels."""
    return importlib.util.find_spec("triton") is not None and is_package()


def is_package() -> bool:
    """Return whether this module belongs to the package, not to a copy that ``gecko.hf.export`` wrote.

    A copy holds no kernels and must not load those of an installed package: their classes are not the copy's, even in
    the same version.
    """
    return __name__ == "gecko.ops.backends.dispatch"


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel: everything that determines the compiled code and the run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Tensors, numbers and constants by parameter name."""
    warps: int
    stages: int = 1
    registers: int | None = None
    """Most registers per thread that the compiler may use; None: as many as it wants."""

    def run(self) -> None:
        """Run the kernel on the device of its first tensor, which need not be the current device.

        Tensors without values, which are fake or on ``meta``, launch nothing.
        """
        first = next(x for x in self.arguments.values() if isinstance(x, Tensor))
        if type(first) not in PLAIN or first.is_meta:
            return
        with torch.cuda.device_of(first):
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options, by Triton's names."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


def blocks(total: int, size: int) -> int:
    """Return the number of blocks of ``size`` that cover ``total``."""
    return -(-total // size)


def tile(size: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``, the minimum of ``tl.dot``."""
    return max(least, 1 << (size - 1).bit_length())


class CustomOp:
    """Custom operator: a pure function of tensors, lists of tensors and numbers that returns new tensors or a list of
    them.

    Lists of tensors in arguments are layouts and have no gradients. An operator without ``register_autograd`` refuses
    derivatives.
    """

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self.registered = torch.library.custom_op(name, forward, mutates_args=())
        self.registered.register_fake(forward)  # it allocates the outputs, and without values launches nothing
        self._name, self._forward = name.replace("::", "_"), forward
        self._differentiable: Callable[..., Any] = self.registered

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the backward pass, as ``torch.library.register_autograd`` does."""
        self.registered.register_autograd(backward, setup_context=setup_context)

        def run(ctx: Any, *arguments: Any) -> Any:
            output = self._forward(*arguments)
            setup_context(ctx, arguments, output)
            ctx.lists = isinstance(output, list)
            return tuple(output) if ctx.lists else output

        def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = backward(ctx, list(grads)) if ctx.lists else backward(ctx, *grads)
            parts = found if isinstance(found, tuple) else (found,)
            return tuple(None if isinstance(x, list) else x for x in parts)

        methods = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
        self._differentiable = type(self._name, (FirstOrder,), methods).apply  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if is_watched() or not all(type(x) in PLAIN for x in tensors):
            return self.registered(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._differentiable(*arguments)
        return self._forward(*arguments)


def custom_op(
    name: str, gradient: Callable[..., Any] | None = None, of: Sequence[int] = (),
    saves: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda inputs, output: inputs,
    results: int | None = None, zeros: bool = True,
) -> Callable[[Callable[..., Any]], CustomOp]:  # fmt: skip
    """Return a decorator that makes a function the operator ``gecko::name``.

    Args:
        gradient: takes the gradients of the outputs, then what ``saves`` chose of inputs and output, and returns those
            of the inputs ``of``. Inputs that are None have none.
        results: number of outputs with gradients; those after them are for the backward pass only. None: all.
        zeros: whether ``gradient`` gets zeros for an output that was not used; it gets None otherwise.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        chosen = saves(inputs, output)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in chosen))
        ctx.others = [None if isinstance(x, Tensor) else x for x in chosen]
        ctx.absent = [isinstance(x, Tensor) or ([None] * len(x) if isinstance(x, list) else None) for x in inputs]
        ctx.set_materialize_grads(zeros)
        if results is not None:
            ctx.mark_non_differentiable(*output[results:])

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        assert gradient is not None
        saved = (other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True))
        found = gradient(*grads[:results], *saved)
        by_place = dict(zip(of, found if isinstance(found, tuple) else (found,), strict=True))
        return tuple(by_place.get(place) if absent is True else absent for place, absent in enumerate(ctx.absent))

    def decorate(forward: Callable[..., Any]) -> CustomOp:
        made = CustomOp(f"gecko::{name}", forward)
        if gradient is not None:
            made.register_autograd(differentiate, setup_context=keep)
        return made

    return decorate
