"""Base of functions with a backward pass of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FirstOrder(torch.autograd.Function):
    """Function whose ``backward`` computes first derivatives only, and raises RuntimeError for others.

    ``once_differentiable`` would not: it does not see a path around the function and silently omits its share.
    """

    def __init_subclass__(cls) -> None:
        backward = cls.backward

        def checked(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{cls.__name__} has first derivatives only; got create_graph=True. "
                    "Try differences of gradients in place of second derivatives."
                )
            return backward(ctx, *grads)

        cls.backward = staticmethod(checked)  # type: ignore[method-assign]
