"""Custom operators at the price of a plain call.

To the compiler, and to whoever traces, counts or transforms PyTorch's operations, an operator is what
``torch.library.custom_op`` registers. By that way a block takes the host half as long again
(``benchmarks/host.py``). Where nobody looks, functions therefore run as they are, and are differentiated by a
``torch.autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gecko.ops.kernels import PLAIN, is_watched


class CustomOp:
    """A function of tensors, lists of tensors and numbers; it changes none of them and returns new tensors.

    Lists of tensors are layouts: they have no gradients. An operator without ``register_autograd`` refuses derivatives.
    """

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self.registered = torch.library.custom_op(name, forward, mutates_args=())
        self._name, self._forward = name, forward
        self._function: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """``fake`` makes outputs of the right shapes and dtypes from tensors that hold no numbers."""
        return self.registered.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As ``torch.library.register_autograd``."""
        self.registered.register_autograd(backward, setup_context=setup_context)
        self._function = _function(self._name, self._forward, backward, setup_context)

    def __call__(self, *arguments: Any) -> Any:
        if is_watched():
            return self.registered(*arguments)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if not all(type(x) in PLAIN for x in tensors):
            return self.registered(*arguments)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self._forward(*arguments)
        return self.registered(*arguments) if self._function is None else self._function.apply(*arguments)


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """The decorated function as the operator ``gecko::name``."""
    return lambda forward: CustomOp(f"gecko::{name}", forward)


def _function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[torch.autograd.Function]:
    def run(ctx: Any, *arguments: Any) -> Any:
        output = forward(*arguments)
        setup_context(ctx, arguments, output)
        return output

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = backward(ctx, *grads)
        parts = found if isinstance(found, tuple) else (found,)
        return tuple(None if isinstance(x, list) else x for x in parts)

    methods = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
    return type(name.replace("::", "_"), (torch.autograd.Function,), methods)
