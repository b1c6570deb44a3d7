"""AdamW over a model's parameters, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gecko.train.run import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW. ``decay="matrices"`` spares every parameter that is not the weight of a linear map or a table."""
    matrices = matrix_names(model)
    decays = {name: settings.decay == "all" or name in matrices for name, _ in named_parameters(model)}
    groups = [
        {
            "params": [parameter for name, parameter in named_parameters(model) if decays[name] is decayed],
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


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
    """The optimizer's state, keyed ``parameter name/state name``; empty before the first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in named_parameters(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what :func:`optimizer_tensors` took. ValueError where the tensors are of another model."""
    parameters = dict(named_parameters(model))
    for key, value in tensors.items():
        name, _, state_name = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"the optimizer state must be of this model; it holds {key!r}, which the model lacks.")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise ValueError(f"{key} must have the shape of its parameter, {list(parameter.shape)}; "
                             f"got {list(value.shape)}.")  # fmt: skip
        optimizer.state[parameter][state_name] = value.to(parameter.device)
