"""Sharding of a model's parameters, gradients and optimizer state among ranks (FSDP2)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from gecko.models import LanguageModel

_METHODS = ("loss", "loss_and_state", "token_losses")
"""Methods of a model that run a forward pass besides ``forward``. A Llama has no state."""


def shard_model(model: LanguageModel, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Shard ``model`` among the ranks of ``mesh`` in place. The parameters of a block are gathered when it runs.

    Parameters and gradient reductions stay float32. With ``bfloat16`` the matrices of blocks are gathered, and their
    gradients computed, in bfloat16; norms, CEMA, embedding and head stay float32.
    """
    # FSDP must not cast a block's float32 inputs, because they include its state.
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if bfloat16:
            # All float32 layers in one group, so that they need one all-gather. The first layer of the group comes
            # first in the block, so its backward pass ends last, as FSDP requires for the end of a group.
            fully_shard([m for m in block.modules() if isinstance(m, model.float32_layers)], mesh=mesh, mp_policy=exact)
        fully_shard(block, mesh=mesh, mp_policy=half if bfloat16 else exact)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    model.sharded = True
    # Blocks return views as states. The warning is about writes into views, and there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in filter(partial(hasattr, model), _METHODS):
        register_fsdp_forward_method(model, name)


def empty_sharded_model(
    template: LanguageModel, mesh: DeviceMesh, device: torch.device, *, bfloat16: bool
) -> LanguageModel:
    """Shard ``template``, a model on the meta device, and allocate its parameters without initialising them."""
    shard_model(template, mesh, bfloat16=bfloat16)
    return template.to_empty(device=device)


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
    """Set a sharded model's parameters to the whole tensors ``weights`` of the first rank; the others pass None."""
    for name, parameter in model.named_parameters():
        sharded = cast(DTensor, parameter)
        whole = torch.empty(sharded.shape, dtype=sharded.dtype, device="cpu") if weights is None else weights[name]
        source = whole.to(sharded.device, sharded.dtype)
        sharded.copy_(distribute_tensor(source, sharded.device_mesh, sharded.placements))


def sum_over_replicas(model: nn.Module, wanted: bool) -> None:
    """Set whether the next backward passes sum gradients over the replicas, or accumulate them for a later one.

    Each backward pass sums them over the ranks that share a replica, so a rank accumulates only its shard.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def release(model: nn.Module) -> None:
    """Free the gathered parameters of the root module, which a forward pass without a backward pass keeps."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Any) -> Tensor:
    """Return the full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
