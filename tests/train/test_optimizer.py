"""AdamW: which parameters decay, and its state as named tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gecko.config import GeckoConfig
from gecko.models.gecko import Gecko
from gecko.train import OptimizerSettings, Run
from gecko.train.checkpointer import read_tensors
from gecko.train.step import build_optimizer, named_parameters, optimizer_tensors


def decayed_names(model: nn.Module, settings: OptimizerSettings) -> set[str]:
    names = {parameter: name for name, parameter in named_parameters(model)}
    groups = build_optimizer(model, settings).param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[p] for group in groups if group["weight_decay"] == settings.weight_decay for p in group["params"]}


def test_all_parameters_decay_by_default(small_run: Run) -> None:
    model = Gecko(small_run.model)
    assert decayed_names(model, OptimizerSettings()) == {name for name, _ in model.named_parameters()}


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


def test_decay_without_gradient_shrinks_only_the_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.ones_(model[0].bias)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, OptimizerSettings(learning_rate=0.5, weight_decay=0.1, decay="matrices"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name == "0.weight" else 1.0))


def test_state_goes_through_a_file_unchanged(small_run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 257, (2, 17))

    def step(model: Gecko, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()

    model = Gecko(small_run.model)
    optimizer = build_optimizer(model, small_run.optimizer)
    step(model, optimizer)
    step(model, optimizer)
    other = copy.deepcopy(model)
    restored = build_optimizer(other, small_run.optimizer)
    save_file(optimizer_tensors(model, optimizer), tmp_path / "optimizer.safetensors")
    read_tensors(tmp_path, optimizer_tensors(other, restored))
    step(model, optimizer)
    step(other, restored)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


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


def test_state_of_another_model_is_refused(small_run: Run, tmp_path: Path) -> None:
    model = Gecko(small_run.model)
    state = optimizer_tensors(model, build_optimizer(model, small_run.optimizer))
    name = "embedding.weight/exp_avg"
    for wrong, message in [({}, "/exp_avg"), ({name: torch.zeros(3)}, name)]:
        missing = {key: value for key, value in state.items() if key != name} if wrong else {}
        save_file({**missing, **wrong}, tmp_path / "optimizer.safetensors")
        with pytest.raises(ValueError, match=f"must hold the tensors of this model.*{message}"):
            read_tensors(tmp_path, dict(state))


def test_presets_have_a_matrix_for_most_parameters() -> None:
    with torch.device("meta"):
        model = Gecko(GeckoConfig.preset("tiny"))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes[name] for name in decayed_names(model, OptimizerSettings(decay="matrices"))) > 0.9 * sum(
        sizes.values()
    )
