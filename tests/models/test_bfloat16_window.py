"""A window in bfloat16 halves the state and rounds its keys and values; nothing else differs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import cases
from support.cases import CHUNK, tokens

import gecko
from gecko import GeckoState
from gecko.inference.decoder import Decoder

VARIANTS = ["gecko", "llama", "gekko"]


def pair(variant: str, dtype: torch.dtype = torch.float32) -> tuple[gecko.Gecko, gecko.Gecko]:
    """Return a model with a window in bfloat16, and the same one without."""
    exact = cases.model(variant, dtype)
    rounded = gecko.Gecko(dataclasses.replace(exact.config, bfloat16_window=True)).to(dtype)
    rounded.load_state_dict(exact.state_dict())
    return rounded.eval(), exact.eval()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_keys_and_values_are_rounded_once(variant, tmp_path):
    """In one call nothing is read from the state, so logits are equal to the bit. The next call computes what the exact
    model does from the rounded state, also from a file."""
    rounded, exact = pair(variant)
    text, more = tokens(2, 2 * CHUNK + 5), tokens(2, CHUNK + 2, seed=1)
    logits, state = rounded(text)
    wanted, whole = exact(text)
    assert torch.equal(logits, wanted)
    for name, x in state.tensors().items():
        there = whole.tensors()[name]
        assert x.dtype == (torch.bfloat16 if ".attention." in name else there.dtype)
        assert torch.equal(x, there.to(x.dtype)), name
    state.save(tmp_path / "text.state")
    back = GeckoState.load(tmp_path / "text.state")
    assert all(torch.equal(x, back.tensors()[name]) for name, x in state.tensors().items())
    wide = dataclasses.replace(state.map(lambda x: x.float() if x.dtype == torch.bfloat16 else x), config=exact.config)
    torch.testing.assert_close(rounded(more, state=back)[0], exact(more, state=dataclasses.replace(wide, model=""))[0])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_decoders_round_what_they_write(variant):
    rounded, _ = pair(variant)
    _, state = rounded(tokens(1, 2 * CHUNK + 5))
    decoder = Decoder(rounded, 1)
    decoder.add(state, torch.zeros(rounded.config.vocab_size, dtype=torch.bool))
    for token in tokens(1, 2 * CHUNK, seed=2)[0].tolist():
        found = decoder.step([token])
        wanted, state = rounded.step(torch.tensor([token]), state)
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)
    after = decoder.state(0).mixers[0].attention
    assert after.keys.dtype == after.values.dtype == torch.bfloat16
    torch.testing.assert_close(after.keys, state.mixers[0].attention.keys, rtol=0.01, atol=1e-6)
