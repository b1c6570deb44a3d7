"""The optimizer of a run: its parameter groups and their learning rates, and its state as named tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gecko.layers.norms import BlockRMSNorm
from gecko.train.muon import Muon
from gecko.train.settings import OptimizerSettings

_FACTOR = "rate_factor"
"""Key of a group's factor of the learning rate."""


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return fused AdamW, or Muon with it, with allocated state.

    ``decay="matrices"`` decays only ``matrix_names`` of the model; norm weights that are factors never decay. Muon
    updates the matrices of blocks.
    """
    groups = _groups(model, settings)
    rates: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    muon = settings.name == "muon"
    optimizer = Muon(groups, **rates) if muon else torch.optim.AdamW(groups, **rates, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # AdamW creates the same state in its first step. It exists from the start, so a checkpoint can be loaded.
            optimizer.state[parameter] = _empty_state(parameter, muon=group["muon"])
    return optimizer


def _groups(model: nn.Module, settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Return the parameters by the rule that updates them, their learning rate and their weight decay."""
    matrices, of_blocks = matrix_names(model), block_matrix_names(model)
    factors = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, BlockRMSNorm)}
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        decayed = name in matrices or (settings.decay == "all" and name not in factors)
        muon = settings.name == "muon" and name in of_blocks
        scaled = name in of_blocks or name in ("head.weight", "lm_head.weight")
        factor = rate_factor(model, settings, muon=muon) if scaled else 1.0
        groups.setdefault((muon, decayed, factor), []).append(parameter)
    return [
        {
            "params": parameters, "muon": muon, _FACTOR: factor,
            "weight_decay": settings.weight_decay / factor if decayed else 0.0,
        }
        for (muon, decayed, factor), parameters in groups.items()
    ]  # fmt: skip


def rate_factor(model: nn.Module, settings: OptimizerSettings, *, muon: bool) -> float:
    """Return the factor of the learning rate of matrices whose inputs grow with the width of the model.

    With w = model_dim / base_width it is 1 / w for AdamW and 1 / √w for Muon; without ``base_width``, 1.

    An update should change a layer's outputs by an amount that does not depend on w. It changes them by its spectral
    norm. For AdamW, whose entries are about the learning rate and are aligned with the inputs, that grows as w, and for
    Muon, which scales an orthogonal matrix by √max(m, n), as √w.
    """
    if settings.base_width is None:
        return 1.0
    config: Any = model.config
    factor = settings.base_width / config.model_dim
    return math.sqrt(factor) if muon else factor


def _empty_state(parameter: nn.Parameter, *, muon: bool) -> dict[str, Tensor]:
    if muon:
        return {"momentum_buffer": _zeros(parameter)}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": _zeros(parameter), "exp_avg_sq": _zeros(parameter)}


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters by name; a tied parameter occurs once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers and embeddings."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }


def block_matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in blocks: not of embedding and head."""
    return {name for name in matrix_names(model) if ".blocks." in f".{name}" or ".layers." in f".{name}"}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups of an optimizer of ``build_optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_FACTOR]


def step_unless(optimizer: torch.optim.Optimizer, skipped: Tensor) -> None:
    """Run the step of an optimizer of ``build_optimizer`` unless ``skipped``, () bool on the device.

    If it is skipped, parameters and state do not change. The host does not wait for the decision: fused optimizers take
    it as ``found_inf``, as from ``torch.amp.GradScaler``.
    """
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
