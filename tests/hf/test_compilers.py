"""``torch.export`` of the model, and options of transformers that ask for a compiler or for kernels of attention."""

from __future__ import annotations

import io

import pytest
import torch
from support.cases import tokens
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig


@pytest.mark.parametrize(("variant", "length"), [("gecko", 1), ("gecko", 20), ("window-linear", 11), ("megalodon", 16)])
def test_an_exported_program_computes_the_logits_of_other_tokens(variant, length, pair):
    model = pair(variant)[1]
    with torch.no_grad():
        program = torch.export.export(model, (tokens(2, length),), strict=False)
        others = tokens(2, length).flip(0, 1)
        expected = model(others).logits
        torch.testing.assert_close(program.module()(others).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_exported_program_of_embeddings_is_saved_and_loaded(pair):
    model, file = pair()[1], io.BytesIO()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(tokens(1, 5))
        program = torch.export.export(model, (), {"inputs_embeds": embeds}, strict=False)
        torch.export.save(program, file)
        file.seek(0)
        found = torch.export.load(file).module()(inputs_embeds=embeds).logits
        torch.testing.assert_close(found, model(inputs_embeds=embeds).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("argument", ["attention_mask", "position_ids", "use_cache"])
def test_export_refuses_what_chooses_the_work(argument, pair):
    ids = tokens(1, 6)
    given = {
        "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6).unsqueeze(0), "use_cache": True
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"torch\.export takes input_ids or inputs_embeds of one shape only"):
        torch.export.export(pair()[1], (ids,), {argument: given[argument]}, strict=False)


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static"}, {"compile_config": CompileConfig()}, {"cache_implementation": "offloaded"}],
    ids=lambda options: "".join(options),
)
def test_compiled_generation_generates_the_same_at_once(options, pair, monkeypatch):
    """The cache is a Gecko's own, and no compiler is called: it would take minutes for every length."""
    model, ids = pair()[1], tokens(2, 9)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("nothing must be compiled"))
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    assert torch.equal(model.generate(ids, generation_config=settings), expected)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_names_of_attention_choose_nothing(name, text_folder):
    """Both are accepted, as scripts name one of them; a Gecko has one attention."""
    ids = tokens(2, 20)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(text_folder, attn_implementation=name)(ids).logits
        assert torch.equal(found, AutoModelForCausalLM.from_pretrained(text_folder)(ids).logits)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_kernels_of_other_attentions_are_refused(name, text_folder):
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash|flex"):
        AutoModelForCausalLM.from_pretrained(text_folder, attn_implementation=name)


def test_batches_of_pages_are_refused(text_folder):
    model = AutoModelForCausalLM.from_pretrained(text_folder)
    with pytest.raises(ValueError, match="generate_batch reads pages of keys"):
        model.generate_batch(inputs=[[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=300))
