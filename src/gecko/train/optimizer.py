"""The optimizer of a run: its parameter groups and their learning rates, its state as named tensors, and Muon.

Muon (Jordan et al., 2024) replaces the momentum M of a matrix by the nearest matrix with orthonormal rows or columns,
which five Newton-Schulz iterations approximate. The update is scaled by 0.2 √max(m, n), so that its root mean square is
that of AdamW, and learning rate and weight decay of AdamW apply (Liu et al., 2025).

``torch.optim.Muon`` exchanges shards for each product, and rounds them to bfloat16 on every device, so that sharded and
single results differ. Here a matrix is gathered once, and the ranks divide the matrices among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gecko.layers import BlockRMSNorm
from gecko.ops.backends.dispatch import on_gpu
from gecko.parallel.sharding import whole
from gecko.train.settings import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return fused AdamW, or Muon with it, with allocated state.

    ``decay="matrices"`` decays only ``matrix_names`` of the model; norm weights that are factors never decay. Muon
    updates the matrices of blocks.
    """
    matrices, of_blocks = matrix_names(model), block_matrix_names(model)
    factors = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, BlockRMSNorm)}
    members: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        decayed = name in matrices or (settings.decay == "all" and name not in factors)
        muon = settings.name == "muon" and name in of_blocks
        scaled = name in of_blocks or name in ("head.weight", "lm_head.weight")
        factor = _rate_factor(model, settings, muon) if scaled else 1.0
        members.setdefault((muon, decayed, factor), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for (muon, decayed, factor), parameters in members.items():
        decay = settings.weight_decay / factor if decayed else 0.0
        groups.append({"params": parameters, "muon": muon, "rate_factor": factor, "weight_decay": decay})
    rates: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    optimizer = Muon(groups, **rates) if settings.name == "muon" else torch.optim.AdamW(groups, **rates, fused=True)
    # AdamW creates the same state in its first step. It exists from the start, so a checkpoint can be loaded.
    for group in optimizer.param_groups:
        names = ("momentum_buffer",) if group["muon"] else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            state = {} if group["muon"] else {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
            optimizer.state[parameter] = {**state, **{name: torch.zeros_like(parameter) for name in names}}
    return optimizer


def _rate_factor(model: nn.Module, settings: OptimizerSettings, muon: bool) -> float:
    """Return the factor of the learning rate of matrices whose inputs grow with the width of the model.

    With w = model_dim / base_width it is 1 / w for AdamW and 1 / √w for Muon; without ``base_width``, 1. An update
    should change a layer's outputs, which it does by its spectral norm, by an amount that does not depend on w. For
    AdamW, whose entries are about the learning rate and aligned with the inputs, that norm grows as w, and for Muon,
    which scales an orthogonal matrix by √max(m, n), as √w.
    """
    if settings.base_width is None:
        return 1.0
    config: Any = model.config
    factor = settings.base_width / config.model_dim
    return math.sqrt(factor) if muon else factor


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters by name; a tied parameter occurs once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers and embeddings."""
    matrices = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding))
    return {f"{name}.weight".removeprefix(".") for name in matrices}


def block_matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in blocks: not of embedding and head."""
    return {name for name in matrix_names(model) if ".blocks." in f".{name}" or ".layers." in f".{name}"}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups of an optimizer of ``build_optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"]


def step_unless(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Run the step of an optimizer of ``build_optimizer`` unless ``skipped``, () bool on the device, for which the host
    does not wait: fused optimizers take it as ``found_inf``, as from ``GradScaler``."""
    deciding: Any = optimizer
    deciding.found_inf = skipped.float()
    try:
        optimizer.step()
    finally:
        del deciding.found_inf


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state, keyed ``parameter name/state name``."""
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵, which move singular values in 0..1 towards 1 fastest (Jordan et al.)."""
ITERATIONS = 5
MOMENTUM = 0.95
RMS = 0.2
"""Root mean square of AdamW's updates (Liu et al.)."""


class Muon(torch.optim.Optimizer):
    """Muon for parameter groups with ``muon=True``, and fused AdamW for the other groups.

    All ranks call ``step`` together. The state of a matrix is its momentum, sharded like the matrix.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr, "weight_decay": 0.0, "muon": False})
        others = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        # Both optimizers share the groups, whose learning rates the trainer sets, and the state, which it saves.
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. ``closure`` must be None.

        As for fused AdamW, nothing changes if the attribute ``found_inf`` is a tensor of 1.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        adamw: Any = self._adamw
        adamw.found_inf = found_inf
        adamw.step()
        skipped = None if found_inf is None else found_inf.bool()
        for group in filter(itemgetter("muon"), self.param_groups):
            matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
            directions = []
            for matrix in matrices:
                momentum = self.state[matrix]["momentum_buffer"]
                _set_unless(skipped, momentum, momentum.lerp(matrix.grad, 1 - MOMENTUM))
                directions.append(matrix.grad.lerp(momentum, MOMENTUM))
            for matrix, update in zip(matrices, _orthogonalised(directions), strict=True):
                decayed = matrix * (1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * RMS * math.sqrt(max(matrix.shape))
                _set_unless(skipped, matrix, decayed.add_(update, alpha=-rate))


def _set_unless(skipped: Tensor | None, target: Tensor, values: Tensor) -> None:
    target.copy_(values if skipped is None else torch.where(skipped, target, values))


def _orthogonalised(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the orthogonalised matrices, sharded as those given. Of n ranks, each computes every n-th."""
    if not matrices or not isinstance(matrices[0], DTensor):
        return [newton_schulz(matrix) for matrix in matrices]
    # The ranks among which FSDP shards parameters; the replicas compute the same.
    dimension = next(i for i, placement in enumerate(matrices[0].placements) if isinstance(placement, Shard))
    group = matrices[0].device_mesh.get_group(dimension)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    found: list[Tensor] = []
    for first in range(0, len(matrices), ranks):
        given: Any = matrices[first : first + ranks]
        some = [whole(matrix) for matrix in given]
        if rank < len(some):
            some[rank] = newton_schulz(some[rank])
        for owner, (full, like) in enumerate(zip(some, given, strict=True)):
            dist.broadcast(full, group=group, group_src=owner)
            shards = full.chunk(ranks)
            local = shards[rank] if rank < len(shards) else full[:0]
            layout: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
            found.append(DTensor.from_local(local, like.device_mesh, like.placements, **layout))
    return found


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return a matrix (m, n) with the singular vectors of ``matrix`` and singular values of about 1.

    Products are bfloat16 on a GPU, and have the dtype of ``matrix`` on a CPU, which may emulate bfloat16 slowly.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if on_gpu(matrix) else matrix
    wide = len(x) <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype).contiguous()
