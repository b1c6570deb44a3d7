"""Gekko, the later Gecko and the paper's own text compute their equations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import cases
from support.equations import LENGTH, Equations

import gecko
from gecko.config import PRESETS, GeckoConfig
from gecko.models.gecko import Gecko
from gecko.runtime.tensors import meta_device

STARTS = (0, 3, 2 * cases.CHUNK + 2)


DESIGNS: dict[str, dict[str, Any]] = {
    **{name: cases.VARIANTS[name] for name in ("gekko", "later-gecko", "paper")},
    "orthogonal": {**cases.VARIANTS["gekko"], "memory": "orthogonal", "rms_eps": 1e-6},
    "gekko-tiny": {**PRESETS["gekko-tiny"].to_dict(), "chunk_size": cases.CHUNK, "num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("starts", [(0,), STARTS], ids=["one", "documents"])
@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_computes_its_equations(name, starts):
    torch.manual_seed(1)
    model = gecko.Gecko(dataclasses.replace(cases.SMALL, **DESIGNS[name])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        text = cases.tokens(1, LENGTH)
        ids = torch.tensor([[sum(t >= start for start in starts) for t in range(LENGTH)]])
        found, _ = model(text, ids)
        wanted = Equations(model.config, dict(model.state_dict()), starts).logits(text[0].tolist())
    torch.testing.assert_close(found[0], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", ["none", "adaptive"])
@pytest.mark.parametrize("heads", [{"num_heads": 1}, {"num_heads": 3}, {"num_heads": 3, "key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("width", [1, 2, 5])
def test_rows_of_any_width_are_read_in_any_calls(width, heads, memory):
    """The convolution joins queries, keys and values, so an odd width of a value makes rows of an odd width."""
    torch.manual_seed(0)
    count = heads["num_heads"]
    sizes = {"key_dim": 4 * count, "value_dim": width * count, **heads, "memory": memory}
    separate = {"queries_and_keys": "separate", "convolution_width": 3, "norm_groups": 1, "timestep_groups": 1}
    model = gecko.Gecko(dataclasses.replace(cases.SMALL, **separate, **sizes)).double()
    for rows in (1, 2):
        text = cases.tokens(rows, LENGTH)
        whole, state = model(text)[0], None
        assert model.loss(text[:, :-1], text[:, 1:]).isfinite()
        for token in range(LENGTH):
            step, state = model(text[:, token : token + 1], state=state)
            torch.testing.assert_close(step[:, 0], whole[:, token])


COUNTS = {"gekko-0.9b": 881_552_384, "gekko-4b": 3_870_725_120, "gekko-7.1b": 6_713_057_280}


@pytest.mark.parametrize(("preset", "parameters"), COUNTS.items())
def test_gekko_has_the_published_number_of_parameters(preset, parameters):
    """Without embedding and head, because the release names no vocabulary."""
    with meta_device():
        model = Gecko(GeckoConfig.preset(preset))
    assert sum(p.numel() for part in (model.blocks, model.final_norm) for p in part.parameters()) == parameters


def test_a_memory_whose_factor_starts_at_0_changes_nothing():
    """Its gradient is not 0, so it is learned."""
    torch.manual_seed(0)
    with_factor = gecko.Gecko(dataclasses.replace(cases.SMALL, memory_factor=0)).double()
    without = gecko.Gecko(dataclasses.replace(cases.SMALL, memory="none")).double()
    weights = {name: x for name, x in with_factor.state_dict().items() if not name.endswith("memory_factor")}
    without.load_state_dict({name: x[:2] if name.endswith(("scale", "offset")) else x for name, x in weights.items()})
    text = cases.tokens(2, LENGTH)
    torch.testing.assert_close(with_factor(text)[0], without(text)[0])
    with_factor.loss(text[:, :-1], text[:, 1:]).backward()
    for block in with_factor.blocks:
        assert block.mixer.memory_factor.grad.abs().min() > 0
