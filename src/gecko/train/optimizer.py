"""AdamW over a model's parameters, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gecko.train.settings import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW, its state allocated. ``decay="matrices"`` spares all but the weights of linear maps and tables."""
    matrices = matrix_names(model)
    decays = {name: settings.decay == "all" or name in matrices for name, _ in named_parameters(model)}
    groups = [
        {
            "params": [parameter for name, parameter in named_parameters(model) if decays[name] is decayed],
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    for _, parameter in named_parameters(model):
        # As AdamW makes it in its first step; a checkpoint is loaded into it.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters, tied ones once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def matrix_names(model: nn.Module) -> set[str]:
    """Names of the weights of linear layers and embeddings."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, keyed ``parameter name/state name``."""
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
