"""A model whose parameters, gradients and optimizer state are divided among ranks (FSDP2)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from gecko.models.registry import LanguageModel

_METHODS = ("loss", "token_losses")
"""What is called of a model besides ``forward``."""


def shard_model(model: LanguageModel, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Divide ``model`` among the ranks of ``mesh`` in place: each block is gathered as it is needed.

    Parameters and reductions stay float32. With ``bfloat16`` the blocks' matrices are gathered, and their
    gradients computed, in bfloat16; norms, moving averages, embedding and head stay float32.
    """
    # A block's float32 inputs, and with them its streaming state, must not be cast silently.
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if bfloat16:
            # One group, so one exchange. The first of them to run is what all else in the block depends on,
            # so its backward ends last, as the group's end must.
            fully_shard([m for m in block.modules() if isinstance(m, model.float32_layers)], mesh=mesh, mp_policy=exact)
        fully_shard(block, mesh=mesh, mp_policy=half if bfloat16 else exact)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    model.sharded = True
    # Blocks return views as states. Nobody writes into them, which is what it warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in _METHODS:
        register_fsdp_forward_method(model, name)


def empty_sharded_model(
    template: LanguageModel, mesh: DeviceMesh, device: torch.device, *, bfloat16: bool
) -> LanguageModel:
    """``template``, built on the meta device, sharded and with memory of any content."""
    shard_model(template, mesh, bfloat16=bfloat16)
    return template.to_empty(device=device)


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
    """Set a sharded model's parameters to the whole tensors that the first rank has; the others give None."""
    for name, parameter in model.named_parameters():
        sharded = cast(DTensor, parameter)
        whole = torch.empty(sharded.shape, dtype=sharded.dtype) if weights is None else weights[name]
        source = whole.to(sharded.device, sharded.dtype)
        sharded.copy_(distribute_tensor(source, sharded.device_mesh, sharded.placements))


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward passes exchange gradients, or leave them where they are for a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def release(model: nn.Module) -> None:
    """Give up the gathered parameters that a forward pass without a backward pass leaves at the root."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Any) -> Tensor:
    """The full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
