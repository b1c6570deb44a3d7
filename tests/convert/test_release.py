"""Checkpoints of the reference release round-trip unchanged; unknown parameters and fields are refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import cases
from support.cases import tokens

import gecko
from gecko.convert import from_reference, to_reference
from gecko.models.gecko import from_weights

VARIANTS = {
    "defaults": {},
    "scaled": {"ffn_scale": True, "swiglu": False, "rope_heads": 1, "two_hop_residual": True, "scale_embedding": True},
    "plain": {"norm_affine": False, "tie_embedding": True, "rope_heads": 0, "timestep_betas": (0.9, 0.97)},
}


def reference(variant: str = "defaults"):
    """Return a model, and its config and weights with the names of the release."""
    torch.manual_seed(0)
    model = gecko.Gecko(dataclasses.replace(cases.SMALL, **VARIANTS[variant]))
    return model, *to_reference(model.config, model.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant):
    model, config, weights = reference(variant)
    ours, back = from_reference(config, weights)
    assert {"z_dim", "ffn_hidden_dim", "timenorm_beta1", "share_emb", "num_rope_heads"} <= config.keys()
    assert {"embed.weight", "layers.1.mega.cema.gamma", "layers.0.nffn.fc1.weight"} <= weights.keys()
    assert ours == model.config
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in model.state_dict().items())
    without = {name: x for name, x in weights.items() if not (model.config.tie_embedding and "output.output" in name)}
    no_matter = {"efficient_attn": "fused", "init_mode": "he", "dropout": 0.0, "output_size": cases.SMALL.vocab_size}
    again = from_reference(config | no_matter, without)
    assert again[0] == model.config and again[1].keys() == back.keys()


def test_complex_gamma_and_derived_tensors():
    """Write them as the release does: complex gamma, with rotary tables and empty priors beside the parameters."""
    model, config, weights = reference()
    saved = {k: torch.view_as_complex(x) if k.endswith("cema.gamma") else x for k, x in weights.items()}
    saved["rope.freqs"] = torch.ones(4)
    for prefix in ("layers.0.mega.timenorm", "layers.1.mega.timenorm", "output.final_norm"):
        saved[f"{prefix}.prior_count"] = torch.tensor(0)
        saved[f"{prefix}.prior_mean"] = torch.zeros(4)
        saved[f"{prefix}.prior_var"] = torch.ones(4)
    with torch.no_grad():
        converted = from_weights(*from_reference(config, saved))
        assert torch.equal(converted(tokens(1, 20))[0], model(tokens(1, 20))[0])


REFUSED = [
    (
        {},
        {"layers.0.mega.wzz.weight": torch.zeros(1)},
        r"'layers.0.mega.wzz.weight'. Did you mean 'layers.0.mega.wz.we",
    ),
    ({"chunksize": 8}, {}, r"got 'chunksize'. Did you mean 'chunk_size'\?"),
    ({}, {"output.final_norm.prior_count": torch.tensor(3)}, r"output.final_norm.prior_count must be 0 .*got 3"),
    ({"output_size": 40}, {}, r"output_size must be .*37.*got 40"),
]


@pytest.mark.parametrize(("changes", "tensors", "message"), REFUSED, ids=lambda _: "")
def test_other_fields_and_parameters_are_refused(changes, tensors, message):
    _, config, weights = reference()
    with pytest.raises(ValueError, match=message):
        from_reference(config | changes, weights | tensors)


@pytest.mark.parametrize("variant", ["chunk", "linear-memory", "no-memory", "cumulative", "learned-skip"])
def test_relatives_have_no_name_in_the_release(variant):
    model = cases.model(variant)
    with pytest.raises(ValueError, match="the reference release has sliding chunk attention"):
        to_reference(model.config, model.state_dict())
