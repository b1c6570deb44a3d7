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
    assert ours == model.config
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in model.state_dict().items())


def test_names_are_the_release_s():
    _, config, weights = reference()
    assert {"z_dim", "ffn_hidden_dim", "timenorm_beta1", "share_emb", "num_rope_heads"} <= config.keys()
    assert {"embed.weight", "layers.1.mega.cema.gamma", "layers.0.nffn.fc3.weight"} <= weights.keys()


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


def test_tied_head_may_be_left_out():
    model, config, weights = reference("plain")
    del weights["output.output.weight"]
    assert from_reference(config, weights)[1].keys() == model.state_dict().keys()


def test_fields_that_do_not_matter_are_accepted():
    model, config, weights = reference()
    extra = {"efficient_attn": "fused", "init_mode": "he", "dropout": 0.0, "output_size": cases.SMALL.vocab_size}
    assert from_reference(config | extra, weights)[0] == model.config


def test_unknown_parameter_is_refused_with_the_nearest():
    _, config, weights = reference()
    weights["layers.0.mega.wzz.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"got 'layers.0.mega.wzz.weight'. Did you mean 'layers.0.mega.wz.weight'\?"):
        from_reference(config, weights)


def test_unknown_field_is_refused_with_the_nearest():
    _, config, weights = reference()
    with pytest.raises(ValueError, match=r"got 'chunksize'. Did you mean 'chunk_size'\?"):
        from_reference(config | {"chunksize": 8}, weights)


def test_prior_that_is_not_empty_is_refused():
    _, config, weights = reference()
    weights["output.final_norm.prior_count"] = torch.tensor(3)
    with pytest.raises(ValueError, match=r"output.final_norm.prior_count must be 0 .*got 3"):
        from_reference(config, weights)


def test_other_output_size_is_refused():
    _, config, weights = reference()
    with pytest.raises(ValueError, match=r"output_size must be .*37.*got 40"):
        from_reference(config | {"output_size": 40}, weights)


@pytest.mark.parametrize("variant", ["chunk", "linear-memory", "no-memory", "cumulative", "learned-skip"])
def test_relatives_have_no_name_in_the_release(variant):
    model = cases.model(variant)
    with pytest.raises(ValueError, match="the reference release has sliding chunk attention"):
        to_reference(model.config, model.state_dict())


def test_missing_parameter_is_refused():
    _, config, weights = reference()
    del weights["layers.1.mega.wv.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.mixer.to_value.bias"):
        gecko.Gecko(cases.SMALL).load_state_dict(from_reference(config, weights)[1])
