"""Models divided among ranks: for training (FSDP2), and for inference (tensor parallelism).

**Training**: ranks shard the parameters, gradients and optimizer state. A block's parameters are gathered when it runs
(``shard_model``), or all of them once a step (``WholeModel``).

**Inference**: each rank computes some heads, CEMA channels and feed-forward features. A block exchanges three tensors
of the width of the residual stream: the outputs of CEMA, which its norm needs whole, the sum of the mixer and the sum
of the feed-forward. Embedding, norms and head are whole on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad

from gecko.config import PAPER, GeckoConfig
from gecko.layers import CEMA, FeedForward, linear, project
from gecko.layers.gated_attention import GatedAttention, Heads, MixerState
from gecko.models import LanguageModel, meta_model
from gecko.models.gecko import Block, Gecko
from gecko.runtime.tensors import map_tensors
from gecko.segments import Segments
from gecko.state import GeckoState


def shard_model(model: LanguageModel, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Shard ``model`` among the ranks of ``mesh`` in place. The parameters of a block are gathered when it runs.

    With ``bfloat16`` the matrices of blocks are gathered, and their gradients computed, in bfloat16. Parameters,
    gradient reductions, norms, CEMA, embedding and head stay float32.
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
    for name in ("loss", "loss_and_state", "token_losses"):  # run a forward pass as ``forward`` does
        if hasattr(model, name):
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
    """Set whether the next backward passes sum gradients over the replicas, or accumulate this rank's shard of them."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def release(model: nn.Module) -> None:
    """Free the gathered parameters of the root module, which a forward pass without a backward pass keeps."""
    if isinstance(model, FSDPModule):
        model.reshard()


class WholeModel:
    """A model with the whole parameters of a sharded one on every rank. Nothing is communicated inside its steps, and
    its parameters stay where they are. Each rank has whole rows."""

    def __init__(self, sharded: LanguageModel) -> None:
        first = cast(DTensor, next(sharded.parameters()))
        self._sharded, self.model = sharded, meta_model(sharded.config).to(first.dtype).to_empty(device=first.device)
        self.model.tie()
        mesh = first.device_mesh
        self._shards, self._shard_group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
        self._replica_group = mesh.get_group(0) if mesh.ndim > 1 else None
        self._buckets: list[list[tuple[DTensor, nn.Parameter]]] = []
        """Parameters of each block, and the others, with their whole copies."""
        seen = set[nn.Parameter]()
        for part, copy in (*zip(sharded.blocks, self.model.blocks, strict=True), (sharded, self.model)):
            pairs: Any = zip(part.parameters(), copy.parameters(), strict=True)
            self._buckets.append([pair for pair in pairs if pair[1] not in seen])
            seen.update(copy.parameters())

    @torch.no_grad()
    def gather(self) -> None:
        """Set the parameters to those of the sharded model, by one collective for each block."""
        model, sharded = self.model, self._sharded
        model.z_loss, model.activation_checkpointing = sharded.z_loss, sharded.activation_checkpointing
        for bucket in self._buckets:
            sizes = [self._padded(copy) for _, copy in bucket]
            parts = [part.to_local().flatten() for part, _ in bucket]
            sent = torch.cat([pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)])
            found = sent.new_empty(self._shards, len(sent))
            dist.all_gather(list(found), sent, self._shard_group)
            for (_, copy), rows in zip(bucket, found.split(sizes, 1), strict=True):
                copy.copy_(rows.flatten()[: copy.numel()].view_as(copy))

    @torch.no_grad()
    def reduce(self) -> None:
        """Set the gradients of the sharded model to the sums of the ranks' gradients of this one, by one collective for
        each block, and another one among replicas."""
        for bucket in self._buckets:
            sizes = [self._padded(copy) for _, copy in bucket]
            grads = [torch.zeros_like(copy) if copy.grad is None else copy.grad for _, copy in bucket]
            rows = [
                pad(grad.flatten(), (0, self._shards * size - grad.numel())).view(self._shards, size)
                for grad, size in zip(grads, sizes, strict=True)
            ]
            sent = torch.cat(rows, 1)
            found = sent.new_empty(sum(sizes))
            dist.reduce_scatter(found, list(sent), group=self._shard_group)
            if self._replica_group is not None:
                dist.all_reduce(found, group=self._replica_group)
            for (part, copy), summed in zip(bucket, found.split(sizes), strict=True):
                here = part.to_local()
                grad = DTensor.from_local(
                    summed[: here.numel()].view_as(here), part.device_mesh, part.placements, run_check=False,
                    shape=part.shape, stride=part.stride(),
                )  # fmt: skip
                part.grad = None if copy.grad is None else grad

    def _padded(self, parameter: Tensor) -> int:
        """Return the numbers of the largest shard of a parameter; ranks divide its first dimension."""
        return -(-len(parameter) // self._shards) * parameter[0].numel()


def whole(tensor: Any) -> Tensor:
    """Return the full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_DIMENSIONS = {
    **dict.fromkeys(("to_shared.weight", "to_shared.bias", "to_value.weight", "to_value.bias", "to_gate.weight"), 0),
    **dict.fromkeys(("to_gate.bias", "cema.alpha", "cema.delta", "cema.theta", "cema.gamma", "cema.omega"), 0),
    **dict.fromkeys(("scale", "offset", "to_hidden.weight", "to_output.weight"), 1),
}
_SPLIT = {f"mixer.{name}": dimension for name, dimension in _DIMENSIONS.items()} | {
    "feed_forward.fc1.weight": 0, "feed_forward.fc3.weight": 0, "feed_forward.fc2.weight": 1,
}  # fmt: skip
"""Dimension along which ranks divide a parameter of a block. Other parameters are whole on every rank."""

_ADDED_ONCE = "mixer.to_hidden.bias"
"""Parameter of a block that is zero on all ranks but the first, because the ranks' outputs are added."""


@dataclass(frozen=True)
class TensorParallel:
    """A rank and its communication with the other ranks."""

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]
    """Returns the sum of the ranks' tensors, and may write into its argument."""
    all_gather: Callable[[Tensor], Tensor]
    """Concatenates the ranks' tensors along the last dimension, in the order of ranks."""

    def part(self, tensor: Tensor, dimension: int) -> Tensor:
        """Return this rank's part of a tensor, a view."""
        return tensor.chunk(self.size, dimension)[self.rank]

    def once(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the first rank and zeros on the others, to be added by ``all_reduce``."""
        return tensor if self.rank == 0 else torch.zeros_like(tensor)


def check_divisible(config: GeckoConfig, size: int) -> None:
    """Raise ValueError unless ``size`` ranks can divide the heads, channels and features of ``config``."""
    if size > 1:
        config.refuse(PAPER, "a model that tensor parallelism divides")
    counts = {name: getattr(config, name) for name in ("num_heads", "model_dim", "ffn_dim")}
    for name, count in counts.items():
        if count % size:
            fits = max(n for n in range(1, size) if not any(other % n for other in counts.values()))
            raise ValueError(
                f"tensor parallelism divides {name} among the ranks; got {name}={count} and {size} ranks. Try {fits}."
            )


def sharded_config(config: GeckoConfig, ranks: TensorParallel) -> GeckoConfig:
    """Return the config of a rank: its heads and feed-forward features, and the whole residual stream."""
    check_divisible(config, ranks.size)
    heads = config.num_heads // ranks.size
    return replace(
        config, num_heads=heads, key_dim=config.key_dim // ranks.size, value_dim=config.value_dim // ranks.size,
        ffn_dim=config.ffn_dim // ranks.size,
        rope_heads=min(max(config.num_rope_heads - ranks.rank * heads, 0), heads),
    )  # fmt: skip


def sharded_model(config: GeckoConfig, ranks: TensorParallel) -> Gecko:
    """Return this rank's part of a model of ``config``, with initial weights. All ranks call it together.

    Logits and hidden states are those of the whole model, on every rank. The model is for inference.
    """
    model = Gecko(sharded_config(config, ranks))
    model.sharded = True
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.mixer = ShardedMixer(model.config, ranks)
        block.feed_forward = ShardedFeedForward(model.config, layer, ranks)
    return model


def sharded_weight(name: str, weight: Tensor, ranks: TensorParallel) -> Tensor:
    """Return this rank's part of the parameter ``name`` of a ``Gecko``."""
    kind = name.split(".", 2)[-1] if name.startswith("blocks.") else ""
    if kind == _ADDED_ONCE:
        return ranks.once(weight)
    return ranks.part(weight, _SPLIT[kind]) if kind in _SPLIT else weight


def sharded_state(state: GeckoState, ranks: TensorParallel) -> GeckoState:
    """Return a state of this rank's ``sharded_config`` with this rank's channels of CEMA only."""
    mixers = (replace(mixer, cema=map_tensors(mixer.cema, lambda x: ranks.part(x, 1))) for mixer in state.mixers)
    return replace(state, mixers=tuple(mixers))


class ShardedMixer(GatedAttention):
    """``GatedAttention`` of some heads, with CEMA of some channels."""

    def __init__(self, config: GeckoConfig, ranks: TensorParallel) -> None:
        super().__init__(config)
        self.ranks = ranks
        channels = config.model_dim // ranks.size
        self.cema: CEMA = CEMA(channels, config.cema_modes, config.cema_skip)
        self.to_hidden: nn.Linear = linear(channels, config.model_dim, bias=True)

    def forward(self, x: Tensor, state: MixerState | None, segments: Segments) -> tuple[Tensor, MixerState]:
        """Return y of the shape of x, (B, T, D), and the state of this rank's heads and channels."""
        ranks = self.ranks
        xn, norm = self.norm(x, None if state is None else state.norm, segments)
        channels = ranks.part(xn, -1).contiguous()
        averaged, moving = self.cema(channels, lambda: None if state is None else state.cema, segments)
        assert self.cema_norm is not None and self.to_shared is not None and self.to_gate is not None
        mx = self.cema_norm(ranks.all_gather(averaged))
        v = self.values(xn)
        z, gate = project(mx, self.to_shared, self.to_gate)
        (y,) = project(ranks.part(mx, -1).contiguous(), self.to_hidden, onto=ranks.once(x))
        before: Heads = (None, None) if state is None else (state.attention, state.memory)
        out, attention, memory = self.mix(self.queries_and_keys((z,)), v, (gate, None), lambda: before, segments)
        (y,) = project(out, self.to_output, onto=y)
        return ranks.all_reduce(y), MixerState(norm, moving, attention, memory)


class ShardedFeedForward(FeedForward):
    """``FeedForward`` of some of the hidden features."""

    def __init__(self, config: GeckoConfig, layer: int, ranks: TensorParallel) -> None:
        super().__init__(config, layer)
        self.ranks = ranks

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        """Return the sum, of the shape of x and onto, (B, T, D)."""
        return self.ranks.all_reduce(super().forward(x, self.ranks.once(onto)))
