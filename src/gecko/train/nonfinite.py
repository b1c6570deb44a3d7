"""Find where a NaN or infinity comes from, and give up when skipped steps do not stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gecko.parallel.mesh import Ranks
from gecko.train.optimizer import named_parameters

_ALONE = Ranks()


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped."""


def check_skips(step: int, consecutive: int, limit: int, cause: str) -> None:
    """NonFiniteError where ``limit`` steps in a row were skipped, ``step`` the last of them, for ``cause``."""
    if consecutive >= limit:
        raise NonFiniteError(
            f"steps {step - consecutive + 1} to {step} were all skipped for their loss or gradient, and "
            f"max_skips={limit}; the last: {cause}. The last checkpoint is untouched. Try a lower "
            "optimizer.learning_rate, a longer schedule.warmup or precision=float32, and continue with --resume."
        )


def find_nonfinite(model: nn.Module, compute: Callable[[], float], ranks: Ranks = _ALONE) -> str:
    """Run ``compute`` (loss and gradients of the batch) again and say what first was not finite.

    In this order: a parameter; the output of a module (the innermost, in order of the forward pass);
    the loss; the gradient of a parameter (in order of the backward pass). Gradients are cleared.
    All ranks call it together and get the same answer.
    """
    names = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    cause = _first(ranks, f"the parameter {names[0]} is not finite" if names else None)
    return cause or _first(ranks, _find_in_step(model, compute)) or (
        "the gradient's norm overflowed, or the step's numbers do not repeat"
    )  # fmt: skip


def _find_in_step(model: nn.Module, compute: Callable[[], float]) -> str | None:
    """What this rank sees."""
    found: list[str] = []
    handles = list(_watch(model, found))
    model.zero_grad(set_to_none=True)
    try:
        loss = compute()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    outputs = [event for event in found if event.startswith("the output")]
    if outputs:
        return outputs[0]
    if not math.isfinite(loss):
        return "the loss is not finite, though every module's output is"
    return found[0] if found else None


def _first(ranks: Ranks, cause: str | None) -> str | None:
    """The first rank's cause that has one; an output before all else, because a NaN spreads from there."""
    causes = [(rank, found) for rank, found in enumerate(ranks.gather(cause)) if found is not None]
    causes.sort(key=lambda pair: not pair[1].startswith("the output"))
    if not causes or ranks.world == 1:
        return causes[0][1] if causes else None
    rank, found = causes[0]
    return f"{found}, on rank {rank}"


def _watch(model: nn.Module, found: list[str]) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks that add one line to ``found`` for each non-finite module output and parameter gradient."""
    for name, module in model.named_modules():
        label = f"the output of {name or 'the model'} ({type(module).__name__.removeprefix('FSDP')}) is not finite"
        yield module.register_forward_hook(partial(_check_output, found, label))
    for name, parameter in named_parameters(model):
        label = f"the gradient of {name} is not finite"
        hooked: Any = parameter  # the method has no annotations
        yield hooked.register_post_accumulate_grad_hook(partial(_check_gradient, found, label))


def _check_output(found: list[str], label: str, module: nn.Module, inputs: Any, output: Any) -> None:
    # A streaming state may hold -inf on purpose (an empty memory's log weight): only an output's first tensor counts.
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if tensors and not _is_finite(tensors[0]):
        found.append(label)


def _check_gradient(found: list[str], label: str, parameter: Tensor) -> None:
    if parameter.grad is not None and not _is_finite(parameter.grad):
        found.append(label)


def _is_finite(tensor: Tensor) -> bool:
    """Of a sharded tensor, this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())
