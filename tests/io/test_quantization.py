"""Quantised weights are close to the originals, unchanged by saving, and have the expected size."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases
from support.cases import VARIANTS, tokens

import gecko
from gecko.io.model_folder import load_tensors, save_tensors
from gecko.io.quantization import GROUP, pack, plain_tensors, quantize, stored_bits, unpack

pytest.importorskip("torchao")

WIDE = dataclasses.replace(cases.SMALL, model_dim=64, key_dim=32, value_dim=96, ffn_dim=128)
"""Its rows are whole groups."""
BITS = pytest.mark.parametrize("bits", [8, 4])


def model(variant: str = "gecko", dtype: torch.dtype = torch.float32) -> gecko.Gecko:
    torch.manual_seed(0)
    config = dataclasses.replace(WIDE, **{**VARIANTS[variant], "rope_frequencies": None})
    if "rope_frequencies" in VARIANTS[variant]:
        angles = tuple(0.5**pair for pair in range(config.key_head_dim // 2))
        config = dataclasses.replace(config, rope_frequencies=angles)
    made = gecko.Gecko(config).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def quantized(bits: int, variant: str = "gecko") -> gecko.Gecko:
    made = model(variant)
    quantize(made, bits)
    return made


def logits(made: gecko.Gecko) -> torch.Tensor:
    with torch.no_grad():
        return made(tokens(2, 40))[0]


@BITS
def test_only_the_matrices_of_the_blocks_are_rounded(bits):
    """The error is at most half a step; a step is relative to the largest number of a row or group."""
    before, after = model().state_dict(), quantized(bits).state_dict()
    rounded = {name for name, weight in after.items() if len(plain_tensors(weight)) > 1}
    matrices = {name for name in before if ".to_" in name or ".fc" in name}
    assert rounded == {name for name in matrices if name.endswith(".weight")}
    for name, weight in before.items():
        if name not in rounded:
            assert torch.equal(after[name], weight)
            continue
        groups = weight.unflatten(1, (-1, GROUP if bits == 4 else weight.shape[1]))
        step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        error = (after[name].dequantize() - weight).unflatten(1, groups.shape[1:]).abs()
        # There is one fewer positive than negative integer, so the largest number may be off by a whole step.
        assert bool((error <= 1.001 * step).all())
        assert float((error <= 0.501 * step).float().mean()) > 0.9
        assert float((error > 0.1 * step).float().mean()) > 0.5


@BITS
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_stay_near(bits, variant):
    exact, rounded = logits(model(variant)), logits(quantized(bits, variant))
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < {8: 0.03, 4: 0.4}[bits]


@BITS
@pytest.mark.parametrize("variant", ["gecko", "learned-skip", "megalodon"])
def test_saved_and_loaded_it_is_the_same_and_goes_on_from_its_own_states_only(bits, variant, tmp_path):
    made = quantized(bits, variant)
    made.save(tmp_path)
    loaded = gecko.load(tmp_path)
    assert torch.equal(logits(loaded), logits(made))
    assert loaded.fingerprint() == made.fingerprint() != model(variant).fingerprint()
    assert gecko.GeckoConfig.load(tmp_path / "config.json") == made.config
    assert (loaded.head.weight is loaded.embedding.weight) is made.config.tie_embedding
    with torch.inference_mode():
        state = made(tokens(1, 30))[1]
        state.save(tmp_path / "state")
        loaded(tokens(1, 3), state=gecko.GeckoState.load(tmp_path / "state"))
        with pytest.raises(ValueError, match="other weights"):
            model(variant)(tokens(1, 3), state=state)


@BITS
def test_loss_and_generation(bits):
    made = quantized(bits)
    with torch.no_grad():
        assert torch.isfinite(made.loss(tokens(1, 20), tokens(1, 20, seed=1)))
    out = gecko.generate(made, [tokens(1, 9)[0], tokens(1, 4)[0]], max_new_tokens=5, temperature=0)
    assert [len(row) for row in out.tokens] == [5, 5]


def test_size_in_a_file(tmp_path):
    """8 bits: one byte per weight and 4 per row; 4 bits: half a byte per weight and 4 per group."""
    made = model()
    matrices = [w for n, w in made.state_dict().items() if (".to_" in n or ".fc" in n) and n.endswith("weight")]
    rest = sum(w.nbytes for w in made.state_dict().values()) - sum(w.nbytes for w in matrices)
    expected = {
        8: rest + sum(w.numel() + 4 * w.shape[0] for w in matrices),
        4: rest + sum(w.numel() // 2 + 4 * w.numel() // GROUP for w in matrices),
    }
    for bits, size in expected.items():
        assert sum(w.nbytes for w in pack(quantized(bits).state_dict()).values()) == size


@settings(max_examples=20)
@given(bits=st.sampled_from([8, 4]), rows=st.integers(1, 5), groups=st.integers(1, 3), seed=st.integers(0, 9))
def test_pack_and_unpack_are_inverse(bits, rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    holder = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(groups * GROUP, rows)])})
    with torch.no_grad():
        holder["blocks"][0].weight.copy_(torch.randn(rows, groups * GROUP, generator=generator))
    blank = copy.deepcopy(holder)
    quantize(holder, bits)
    quantize(blank, bits)
    weights = holder.state_dict()
    packed = pack(weights)
    assert stored_bits(packed) == bits
    again = unpack(packed, blank.state_dict())
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        for x, y in zip(plain_tensors(again[name]), plain_tensors(weight), strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)


def test_what_is_refused():
    with pytest.raises(ValueError, match="bits must be 8 or 4; got 5"):
        quantize(model(), 5)
    with pytest.raises(ValueError, match=r"blocks.0.mixer.*is float64"):
        quantize(model(dtype=torch.float64), 8)
    with pytest.raises(ValueError, match="must not be quantised yet"):
        quantize(quantized(8), 4)
    for holder in (torch.nn.ModuleDict({"gecko": model()}), torch.nn.Linear(GROUP, GROUP)):
        with pytest.raises(ValueError, match=rf"a Gecko, .*; got a {type(holder).__name__} .*model\.gecko"):
            quantize(holder, 8)
    narrow = gecko.Gecko(cases.SMALL)
    with pytest.raises(ValueError, match=r"rows of whole groups of 32.*rows of 24\. Try 8 bits"):
        quantize(narrow, 4)
    assert all(len(plain_tensors(weight)) == 1 for weight in narrow.state_dict().values()), "half a model is rounded"


@BITS
@pytest.mark.parametrize("size", ["value_dim", "ffn_dim"])
def test_narrow_matrices_are_rounded_or_refused_whole(bits, size):
    """A row of one weight is refused: its scale would take the memory that the weight takes."""
    torch.manual_seed(0)
    for width in (1, 2, 3, GROUP):
        made = gecko.Gecko(dataclasses.replace(WIDE, num_heads=1, **{size: width}))
        exact = logits(made)
        try:
            quantize(made, bits)
        except ValueError as error:
            assert f"has rows of {width}" in str(error)
            assert bits == 4 or width == 1
            assert torch.equal(logits(made), exact)
        else:
            assert float((logits(made) - exact).norm() / exact.norm()) < {8: 0.03, 4: 0.4}[bits]


@BITS
def test_a_file_that_lacks_a_weight(bits, tmp_path):
    quantized(bits).save(tmp_path)
    tensors, metadata = load_tensors(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("to_value.weight.scale"))
    save_tensors(tmp_path / "model.safetensors", {n: x for n, x in tensors.items() if n != lost}, metadata)
    with pytest.raises(ValueError, match=r"to_value.weight.scale must be float32 of shape .*, and is absent"):
        gecko.load(tmp_path)
