"""Linear layers of one input, called together: the operator takes them in one go where nobody must see each."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gecko.ops.dtypes import from_linear
from gecko.ops.projections import projections


def project(x: Tensor, *layers: nn.Linear, onto: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output of every layer for x, the last one's plus ``onto``.

    Layers that are more than ``nn.Linear`` (adapters, parametrisations) and those with hooks are called as modules.
    """
    if all(map(is_bare, layers)):
        return projections(x, [layer.weight for layer in layers], [layer.bias for layer in layers], onto)
    outputs = [from_linear(layer(x), x) for layer in layers]
    if onto is not None:
        outputs[-1] = onto + outputs[-1]
    return tuple(outputs)


def is_bare(layer: nn.Linear) -> bool:
    """Whether all that the layer does is in its weight and bias."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):  # accelerate replaces it where weights are elsewhere
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not _has_any_global_hook()
