"""Converted Megalodon checkpoints equal ``megalodon-jax``, an independent implementation; skipped if not installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.conftest import Command

import gecko

peer = pytest.importorskip("megalodon_jax", reason="pip install 'gecko-lm[peers]'")
peer_files = pytest.importorskip("megalodon_jax.convert")
jax = pytest.importorskip("jax")

SMALL: dict[str, Any] = {
    "vocab_size": 61, "num_layers": 3, "model_dim": 48, "z_dim": 16, "value_dim": 64, "num_heads": 2,
    "ffn_hidden_dim": 72, "cema_ndim": 4, "chunk_size": 16, "norm_num_groups": 8,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gated": {"swiglu": True, "rescale_nffn": True, "scale_emb": True, "rope_base": 100_000.0},
    "tied": {"share_emb": True, "norm_affine": False, "num_heads": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_converted_megalodon_computes_what_the_peer_does(variant: str, command: Command, tmp_path: Path) -> None:
    fields = SMALL | VARIANTS[variant]
    theirs = peer.MegalodonForCausalLM(peer.MegalodonConfig(**fields), key=jax.random.PRNGKey(3))
    state = peer_files.export_upstream_state_dict(theirs)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in state.items():  # none keeps its special initial value
        if tensor.is_floating_point() and "prior" not in name and name != "rope.freqs":
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    if fields.get("share_emb"):
        state["output.output.weight"] = state["embed.weight"].clone()
    theirs = peer_files.load_upstream_state_dict(theirs, state)
    (tmp_path / "release").mkdir()
    torch.save(state, tmp_path / "release" / "consolidated.pth")
    (tmp_path / "release" / "config.json").write_text(json.dumps({"model": fields, "tokenizer": {}}))
    command("convert", tmp_path / "release", tmp_path / "ours", code=0)
    tokens = torch.randint(61, (2, 80), generator=generator)
    expected = np.asarray(theirs(jax.numpy.asarray(tokens.numpy()))[0])
    with torch.no_grad():
        found = gecko.load(tmp_path / "ours")(tokens)[0].numpy()
    error = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"{variant}: largest difference of logits {error:.1e} of the largest logit {np.abs(expected).max():.1f}")
    assert error < 2e-5
