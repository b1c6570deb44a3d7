"""Embeddings in place of tokens, hidden states of all layers, shifted labels, and prompts that are trained."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from support import cases
from support.cases import SMALL, tokens
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

import gecko
from gecko.hf import GeckoCache, GeckoConfig, GeckoForCausalLM, byte_tokenizer

IGNORED = -100
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9])


@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_embeddings_give_what_their_tokens_give(variant, pair):
    _, theirs = pair(variant)
    ids = tokens(3, 9)
    embeds = theirs.get_input_embeddings()(ids).masked_fill(MASK.unsqueeze(-1) == 0, math.nan)
    expected = theirs(ids, attention_mask=MASK, labels=ids, use_cache=True)
    found = theirs(inputs_embeds=embeds, attention_mask=MASK, labels=ids, use_cache=True)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    state = expected.past_key_values.state.tensors()
    for name, tensor in found.past_key_values.state.tensors().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("options", [{"use_cache": False}, {"num_beams": 3}])
def test_generation_continues_embeddings(options, pair):
    _, theirs = pair()
    ids, mask = tokens(2, 9), MASK[[0, 2]]
    expected = theirs.generate(ids, attention_mask=mask, **GREEDY, **options)[:, 9:]
    embeds = theirs.get_input_embeddings()(ids)
    assert torch.equal(theirs.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY, **options), expected)


def test_gradients_reach_the_embeddings(pair):
    _, theirs = pair()
    ids = tokens(2, 12)
    embeds = theirs.get_input_embeddings()(ids).detach().requires_grad_()
    loss = theirs(inputs_embeds=embeds, labels=ids).loss
    (found,) = torch.autograd.grad(loss, embeds)
    (expected,) = torch.autograd.grad(theirs(ids, labels=ids).loss, theirs.get_input_embeddings().weight)
    summed = torch.zeros_like(expected).index_add(0, ids.flatten(), found.flatten(0, 1))
    torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["gecko", "linear-memory"])
@pytest.mark.parametrize("masked", [False, True])
def test_hidden_states_are_the_inputs_of_blocks_and_head(masked, variant, pair, monkeypatch):
    ours, theirs = pair(variant)
    ids = tokens(3, 9)
    mask = MASK if masked else torch.ones_like(ids)
    monkeypatch.setattr("gecko.hf.batch.piece_length", lambda config: 4)
    with torch.no_grad():
        out = theirs(ids, attention_mask=mask, output_hidden_states=True)
        assert len(out.hidden_states) == ours.config.num_layers + 1
        for row, text in enumerate(mask.bool()):
            x = ours.embedding(ids[row : row + 1, text])
            if ours.config.scale_embedding:
                x = x * math.sqrt(ours.config.model_dim)
            torch.testing.assert_close(out.hidden_states[0][row : row + 1, text], x)
            last, _ = ours.hidden(ids[row : row + 1, text])
            torch.testing.assert_close(out.hidden_states[-1][row : row + 1, text], last, rtol=0, atol=1e-11)
        torch.testing.assert_close(ours.head(out.hidden_states[-1]), out.logits, rtol=0, atol=1e-11)
        some = theirs(ids, attention_mask=mask, output_hidden_states=[0, -1]).hidden_states
    kept = {0, len(some) - 1}
    for index, (layer, whole) in enumerate(zip(some, out.hidden_states, strict=True)):
        assert layer is None if index not in kept else torch.equal(layer, whole)
    assert not any(block._forward_pre_hooks for block in ours.blocks)
    with torch.no_grad():
        states = theirs(ids, output_hidden_states=True).hidden_states
        for block, before, after in zip(ours.blocks[:-1], states[:-2], states[1:-1], strict=True):
            segments = gecko.segments.Segments.build(3, 9)
            torch.testing.assert_close(block(before, None, segments)[0], after, rtol=0, atol=1e-11)


def test_the_config_can_ask_for_hidden_states():
    model = GeckoForCausalLM(GeckoConfig.of(SMALL, output_hidden_states=True))
    assert len(model(tokens(1, 5)).hidden_states) == SMALL.num_layers + 1
    assert model(tokens(1, 5), output_hidden_states=False).hidden_states is None


def test_a_version_newer_than_those_tested_is_named_once_and_refused_only_where_a_call_fails(monkeypatch, caplog):
    config = GeckoConfig.of(SMALL)
    assert GeckoForCausalLM(config)(tokens(1, 5), new=False).logits.shape == (1, 5, SMALL.vocab_size)
    assert "tested" not in caplog.text
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    models = [GeckoForCausalLM(config) for _ in range(2)]
    assert caplog.text.count("transformers 5.99.0 is newer than 5.24, the newest that was tested") == 1
    assert torch.equal(models[0].generate(tokens(1, 5), max_new_tokens=2)[:, :5], tokens(1, 5))
    with pytest.raises(TypeError, match=r"no argument new. transformers 5\.99\.0 is newer than"):
        models[0](tokens(1, 5), new=True)


@pytest.mark.parametrize("masked", [False, True])
def test_shifted_labels_are_the_targets_themselves(masked, pair):
    _, theirs = pair()
    ids = tokens(3, 9)
    mask = MASK if masked else None
    labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), IGNORED)], dim=1)
    if mask is not None:  # what stands at the padding must not count
        shifted = torch.where((mask == 1) & (shifted != IGNORED), shifted, torch.where(mask == 0, 5, IGNORED))
    expected = theirs(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(theirs(ids, attention_mask=mask, shift_labels=shifted).loss, expected)
    both = {"labels": tokens(3, 9, 4), "shift_labels": shifted, "num_items_in_batch": 7}
    count = int((labels[:, 1:] != IGNORED).sum()) - (1 if masked else 0)  # the first token of the row padded before it
    torch.testing.assert_close(theirs(ids, attention_mask=mask, **both).loss, expected * count / 7)


def test_shifted_labels_train_the_last_token_of_a_call_and_no_document_on_the_next(pair):
    """Parts of a text on several ranks have a target at their last token, which the next rank reads."""
    _, theirs = pair()
    ids = tokens(1, 11)
    out = theirs(ids[:, :10], shift_labels=ids[:, 1:])
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0], ids[0, 1:]))
    ids, positions = tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    shifted = torch.cat([ids[:, 1:], torch.full((1, 1), IGNORED)], dim=1)
    expected = theirs(ids, position_ids=positions, labels=ids).loss
    torch.testing.assert_close(theirs(ids, position_ids=positions, shift_labels=shifted).loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_trained_prompts(side, text_folder, tmp_path):
    """PEFT reads them before every row; with padding on the left, the padding then is inside of the text."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(text_folder)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(model, config)
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    texts = ["def f(", "a longer one"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    optimizer, losses = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=3.0), []
    for _ in range(5):
        loss = tuned.train()(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    made = tuned.eval().generate(**batch, max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        together = tuned(**batch).logits
    total = count = 0
    for row, text in enumerate(texts):
        alone = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            logits = tuned(**alone, labels=alone["input_ids"])
        kept = torch.cat([torch.ones(4), batch["attention_mask"][row]]).bool()
        torch.testing.assert_close(together[row, kept], logits.logits[0], atol=1e-4, rtol=1e-4)
        expected = tuned.generate(**alone, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert made[row, -6:].tolist() == expected[0, -6:].tolist()
        total, count = total + logits.loss * len(alone["input_ids"][0]), count + len(alone["input_ids"][0])
    with torch.no_grad():
        torch.testing.assert_close(tuned(**batch, labels=labels).loss, total / count, atol=1e-5, rtol=1e-5)
    tuned.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(text_folder), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, together)


def test_prefix_tuning_is_refused_by_name(text_folder):
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(text_folder), config)
    for call in (tuned, tuned.generate):
        with pytest.raises(TypeError, match=r"Prefix tuning of PEFT .*use prompt tuning, p-tuning"):
            call(**byte_tokenizer()("def f(", return_tensors="pt"))


def test_a_row_without_text_keeps_its_state(pair):
    """A later call continues the row; until then its logits are those of its last token."""
    ours, theirs = pair()
    ids = tokens(2, 6)
    cache = GeckoCache()
    with torch.no_grad():
        first = theirs(ids, past_key_values=cache).logits
        second = theirs(ids[:, :3], attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]]), past_key_values=cache).logits
        assert torch.equal(second[0], first[0, -1:].expand(3, -1))
        expected = ours(ids[:1])[1].tensors()
        for name, tensor in cache.state.rows([0]).tensors().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-11)
        last = theirs(ids[:, :1], past_key_values=cache).logits
        torch.testing.assert_close(last[:1], ours(torch.cat([ids, ids[:, :1]], 1))[0][:1, -1:], rtol=0, atol=1e-11)


@pytest.mark.parametrize(("variant", "length"), [("gecko", 20), ("window-linear", 1)])
def test_an_exported_program_computes_the_logits_of_other_tokens(variant, length, pair):
    model = pair(variant)[1]
    with torch.no_grad():
        program = torch.export.export(model, (tokens(2, length),), strict=False)
        others = tokens(2, length).flip(0, 1)
        expected = model(others).logits
        torch.testing.assert_close(program.module()(others).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_exported_program_of_embeddings_is_saved_and_loaded(pair):
    model, file = pair("megalodon")[1], io.BytesIO()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(tokens(1, 5))
        program = torch.export.export(model, (), {"inputs_embeds": embeds}, strict=False)
        torch.export.save(program, file)
        file.seek(0)
        found = torch.export.load(file).module()(inputs_embeds=embeds).logits
        torch.testing.assert_close(found, model(inputs_embeds=embeds).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{"attention_mask": torch.ones(1, 6)}, {"position_ids": torch.arange(6)[None]}, {"use_cache": True}]
)
def test_export_refuses_what_chooses_the_work(given, pair):
    with pytest.raises(RuntimeError, match=r"torch\.export takes input_ids or inputs_embeds of one shape only"):
        torch.export.export(pair()[1], (tokens(1, 6),), given, strict=False)


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


def test_names_of_attention_choose_nothing(text_folder):
    """Scripts name one of the first two; a Gecko has one attention."""
    models = [AutoModelForCausalLM.from_pretrained(text_folder, attn_implementation=name) for name in ("eager", "sdpa")]
    with torch.no_grad():
        assert torch.equal(*(model(tokens(2, 20)).logits for model in models))
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ImportError, ValueError), match=r"(?i)flash|flex"):
            AutoModelForCausalLM.from_pretrained(text_folder, attn_implementation=name)


def test_batches_of_pages_are_refused(pair):
    model = pair()[1]
    with pytest.raises(ValueError, match="generate_batch reads pages of keys"):
        model.generate_batch(inputs=[[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=300))
