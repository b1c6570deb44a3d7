"""AdamW and Muon: which parameters they update and decay, their learning rates, and their state as named tensors."""

import copy
from dataclasses import replace

import pytest
import torch
from support.cases import LLAMA, SMALL
from torch import nn

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.train import OptimizerSettings, Run
from gecko.train.optimizer import (
    block_matrix_names,
    build_optimizer,
    named_parameters,
    newton_schulz,
    set_learning_rate,
)


def decayed_names(model: nn.Module, settings: OptimizerSettings) -> set[str]:
    names = {parameter: name for name, parameter in named_parameters(model)}
    groups = build_optimizer(model, settings).param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[p] for group in groups if group["weight_decay"] == settings.weight_decay for p in group["params"]}


def test_an_epsilon_is_one_in_float32() -> None:
    """A row of zero gradients, as of a token that no text has, is divided by it."""
    for eps in (1.1e-30, 1e-8, 1.0):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.zeros(4)
        settings = OptimizerSettings(eps=eps, weight_decay=0.0)
        torch.optim.AdamW([parameter], eps=settings.eps, weight_decay=0.0).step()
        assert torch.equal(parameter, torch.ones(4))
    for eps in (0.0, 1e-300, 1e-46, 1e-30, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^optimizer\.eps must be a number, above 1e-30"):
            OptimizerSettings(eps=eps)


def test_all_parameters_decay_but_norm_weights_that_are_factors() -> None:
    for config in (SMALL, replace(SMALL, **LLAMA)):
        model = Gecko(config)
        names = {name for name, _ in model.named_parameters()}
        factors = {name for name in names if name.endswith("norm.weight")} if config is not SMALL else set()
        assert len(factors) == (2 * len(model.blocks) + 1) * (config is not SMALL)
        assert decayed_names(model, OptimizerSettings()) == names - factors


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_option_spares_norms_biases_and_moving_averages(small_run: Run, tied: bool) -> None:
    model = Gecko(replace(small_run.model, tie_embedding=tied))
    decayed = decayed_names(model, OptimizerSettings(decay="matrices"))
    assert {"embedding.weight", "blocks.0.mixer.to_value.weight", "blocks.1.feed_forward.fc2.weight"} <= decayed
    assert ("head.weight" in decayed) is not tied
    spared = {name for name, _ in model.named_parameters()} - decayed
    assert all("norm" in name or "bias" in name or "cema" in name or "mixer.scale" in name or "mixer.offset" in name
               for name in spared)  # fmt: skip
    assert not any("norm" in name or "cema" in name for name in decayed)


def test_the_state_before_the_first_step_is_the_one_that_adamw_makes(small_run: Run) -> None:
    model = Gecko(small_run.model)
    ours = build_optimizer(model, small_run.optimizer)
    made = torch.optim.AdamW(model.parameters(), fused=True, lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for parameter in model.parameters():
        expected = {**made.state[parameter], "step": torch.zeros(())}
        assert ours.state[parameter].keys() == expected.keys()
        for name, value in ours.state[parameter].items():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name])


MUON = OptimizerSettings(name="muon", learning_rate=0.01)


def gradients(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_muon_updates_matrices_as_torch_does_and_the_rest_as_adamw_does(small_run: Run) -> None:
    """PyTorch's Muon rounds to bfloat16, so directions agree to that."""
    torch.manual_seed(0)
    ours = Gecko(small_run.model)
    theirs, plain = copy.deepcopy(ours), copy.deepcopy(ours)
    optimizers = [build_optimizer(ours, MUON), build_optimizer(plain, OptimizerSettings(learning_rate=0.01))]
    matrices = [p for name, p in theirs.named_parameters() if name in block_matrix_names(theirs)]
    optimizers.append(torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw"))
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    for model, optimizer in zip((ours, plain, theirs), optimizers, strict=True):
        for _ in range(3):
            gradients(model)
            optimizer.step()
    others, same = dict(theirs.named_parameters()), dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if name in block_matrix_names(ours):
            change, expected = parameter - before[name], others[name] - before[name]
            assert (change - expected).norm() < 0.03 * expected.norm(), name
        else:
            assert torch.equal(parameter, same[name]), name


@pytest.mark.parametrize("shape", [(12, 12), (5, 30), (30, 5)])
def test_newton_schulz_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ newton_schulz(matrix) @ v.T
    assert (found - found.diagonal().diag()).abs().max() < 1e-9
    assert found.diagonal().min() > 0.6 and found.diagonal().max() < 1.3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rates_of_a_wider_model_follow_the_width(name: str) -> None:
    """Weight decay of a step, rate × decay, does not change."""
    model = Gecko(replace(GeckoConfig.preset("tiny"), num_layers=1))
    settings = OptimizerSettings(name=name, base_width=32, weight_decay=0.3)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, settings)
    set_learning_rate(optimizer, 0.5)
    factor = 32 / model.config.model_dim
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for key, parameter in model.named_parameters():
        wide = factor if name == "adamw" or key == "head.weight" else factor**0.5
        scaled = key == "head.weight" or key in block_matrix_names(model)
        assert rates[id(parameter)] == pytest.approx(0.5 * (wide if scaled else 1))
    for group in optimizer.param_groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.15)
