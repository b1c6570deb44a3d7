"""``generate`` of transformers produces the tokens that Gecko's own generation produces."""

import pytest
import torch
from support.cases import tokens
from transformers import AutoModelForCausalLM, pipeline

import gecko
from gecko.hf import GeckoCache, byte_tokenizer
from gecko.inference.packed_weights import decoder_of

PAD = 0
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}


def left_padded(lengths: list[int], seed: int = 0) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    prompts = [tokens(1, length, seed + row)[0] for row, length in enumerate(lengths)]
    width = max(lengths)
    ids = torch.stack([torch.cat([torch.full((width - len(p),), PAD), p]) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    return prompts, {"input_ids": ids, "attention_mask": mask}


def test_beams_with_a_cache_are_those_without(pair):
    _, theirs = pair()
    _, inputs = left_padded([9, 17, 4])
    options = {**GREEDY, "num_beams": 4, "num_return_sequences": 2}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    cached = theirs.generate(**inputs, **options)
    anew = theirs.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached.sequences, anew.sequences)
    torch.testing.assert_close(cached.sequences_scores, anew.sequences_scores)
    alone = theirs.generate(inputs["input_ids"][1:2], attention_mask=torch.ones(1, 17), **options)
    assert torch.equal(alone.sequences, cached.sequences[2:4])
    greedy = theirs.generate(**inputs, **GREEDY)
    assert not torch.equal(cached.sequences[::2], greedy), "beams must differ from greedy to show anything"


def test_a_stopped_row_does_not_disturb_the_others(pair):
    ours, theirs = pair()
    prompts, inputs = left_padded([9, 17, 4])
    expected = gecko.generate(ours, prompts, max_new_tokens=12, temperature=0).tokens
    stop = expected[0][2]
    out = theirs.generate(**inputs, **GREEDY, eos_token_id=stop)[:, 17:].tolist()
    for found, whole in zip(out, expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert found[:end] == whole[:end] and set(found[end:]) <= {PAD}


def test_a_text_goes_on_from_a_state_in_a_file(pair, tmp_path):
    """The text is read once and continued twice, and need not be available any more."""
    ours, theirs = pair()
    book = tokens(1, 50)
    gecko.generate(ours, book, max_new_tokens=0).state.save(tmp_path / "book.state")
    read = gecko.GeckoState.load(tmp_path / "book.state")
    for seed in (1, 2):
        question = tokens(1, 5, seed)
        out = theirs.generate(question, attention_mask=torch.ones(1, 5), past_key_values=GeckoCache(read), **GREEDY)
        whole = theirs.generate(torch.cat([book, question], dim=1), attention_mask=torch.ones(1, 55), **GREEDY)
        assert torch.equal(out[:, 5:], whole[:, 55:])
    assert read.position == [50]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_whole_text_with_a_cache_reads_only_what_is_new(name, pair, monkeypatch):
    ours, theirs = pair()
    cache, book = GeckoCache(), tokens(2, 30)
    with torch.no_grad():
        theirs(book, **{name: cache})
    read: list[int] = []
    hidden = ours.__class__.hidden
    monkeypatch.setattr(
        ours.__class__, "hidden", lambda self, ids, *rest: (read.append(ids.shape[1]), hidden(self, ids, *rest))[1]
    )
    longer = torch.cat([book, tokens(2, 4, 7)], dim=1)
    theirs.generate(longer, attention_mask=torch.ones(2, 34), **{name: cache}, **GREEDY)
    assert read == [4] + [1] * 11


def turns(theirs, lengths: list[int], stop: int | None) -> tuple[GeckoCache, torch.Tensor, torch.Tensor]:
    """Run a first turn; return the cache, the ids with a second question appended, and the mask of non-padding."""
    cache = GeckoCache()
    _, inputs = left_padded([length - 1 for length in lengths])
    # None of these prompts contains the padding id.
    inputs["input_ids"] = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"].clamp(min=1), PAD)
    first = theirs.generate(**inputs, **GREEDY, past_key_values=cache, eos_token_id=stop)
    ids = torch.cat([first, tokens(len(lengths), 4, 7).clamp(min=1)], dim=1)
    return cache, ids, (ids != PAD).long()


def assert_as_alone(theirs, ids: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> None:
    for row, text, found in zip(ids, mask.bool(), out, strict=True):
        alone = theirs.generate(row[text][None], attention_mask=torch.ones(1, int(text.sum())), **GREEDY)
        assert torch.equal(alone[0, int(text.sum()) :], found[len(row) :])


def test_a_second_turn_is_as_alone_or_refused_after_rows_stopped(pair, monkeypatch):
    """Padding appended to a stopped row becomes text of its state once it is read; a mask cannot remove it."""
    _, theirs = pair()
    monkeypatch.setattr(theirs.generation_config, "suppress_tokens", [PAD])
    whole, seen = turns(theirs, [9, 17, 4], None)[1], set()
    for stop in (None, *whole[0, 16:20].tolist()):
        cache, ids, mask = turns(theirs, [9, 17, 4], stop)
        read = bool((mask[:, 16 : cache.get_seq_length()] == 0).any())
        seen.add(read)
        if read:
            with pytest.raises(ValueError, match=r"in row \d it differs.*one row at a time, or .* ended together"):
                theirs.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        else:
            out = theirs.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
            assert_as_alone(theirs, ids, mask, out)
    assert seen == {True, False}, "some rows must have stopped long before the others, and some beside them"


CHANGES = {
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "left": (lambda cache: None, [0, 1, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_mask_must_repeat_what_was_read_as_text(change, pair):
    _, theirs = pair()
    _, inputs = left_padded([9, 17, 4])
    cache = GeckoCache()
    with torch.no_grad():
        theirs(**inputs, past_key_values=cache)
        theirs(tokens(3, 2), past_key_values=cache)
        alter, rows = CHANGES[change]
        alter(cache)
        read = torch.cat([inputs["attention_mask"], torch.ones(3, 2)], dim=1)[rows]
        new = tokens(len(rows), 1)
        wrong = torch.cat([read, torch.ones_like(new)], dim=1)
        wrong[-1, 14] = 1 - wrong[-1, 14]
        with pytest.raises(ValueError, match=f"row {len(rows) - 1}.*column 14"):
            theirs(new, attention_mask=wrong, past_key_values=cache)
        assert cache.get_seq_length() == 19
        theirs(new, attention_mask=torch.cat([read, torch.ones_like(new)], dim=1), past_key_values=cache)
        longer = torch.cat([read, torch.ones(len(rows), 2)], dim=1)
        out = theirs(new, attention_mask=longer, past_key_values=cache, labels=new)
    assert cache.get_seq_length() == 21 and out.loss == 0


HISTORIES = {
    "other tokens": lambda ids: torch.cat([ids[:, :3], (ids[:, 3:4] + 1) % 37, ids[:, 4:]], dim=1),
    "tokens in another order": lambda ids: torch.cat([ids[:, [1, 0]], ids[:, 2:]], dim=1),
    "rows in another order": lambda ids: ids[[0, 2, 1]],
}


@pytest.mark.parametrize("history", HISTORIES)
def test_a_text_must_begin_with_what_was_read(history, pair):
    _, theirs = pair()
    cache, ids = GeckoCache(), torch.arange(1, 28).view(3, 9)
    with torch.no_grad():
        theirs(ids[:, :5], past_key_values=cache)
        theirs(ids[:, 5:], past_key_values=cache)
    longer = torch.cat([ids, ids[:, :2]], dim=1)
    with pytest.raises(ValueError, match=r"must begin with the tokens that the cache has read; those of row \d differ"):
        theirs.generate(HISTORIES[history](longer), past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"the 9 columns that the cache has read, and new ones; got 4"):
        theirs.generate(longer[:, -4:], past_key_values=cache, **GREEDY)
    alone = theirs.generate(longer, attention_mask=torch.ones_like(longer), **GREEDY)
    assert torch.equal(theirs.generate(longer, past_key_values=cache, **GREEDY), alone)


def test_the_states_of_beams_are_refused_for_other_sequences(pair):
    """A beam search returns its best sequences, and leaves the states of the last beams in another order."""
    _, theirs = pair()
    ids = tokens(1, 9)
    made = theirs.generate(ids, **GREEDY, num_beams=4, num_return_sequences=4, return_dict_in_generate=True)
    longer = torch.cat([made.sequences, tokens(4, 3, 5)], dim=1)
    with pytest.raises(ValueError, match="must begin with the tokens that the cache has read"):
        theirs.generate(longer, past_key_values=made.past_key_values, **GREEDY)


@pytest.mark.parametrize("kept", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1], [0]], ids=str)
def test_a_cache_must_hold_every_row_that_is_generated(kept, pair):
    """``generate`` repeats prompts for beams and samples, and the cache holds the repeated rows."""
    _, theirs = pair()
    ids, cache = tokens(2, 12), GeckoCache()
    with torch.no_grad():
        theirs(ids[:, :9], past_key_values=cache)
    cache.batch_select_indices(torch.tensor(kept))
    beams = {**GREEDY, "num_beams": 2, "attention_mask": torch.ones_like(ids)}
    if kept == [0, 0, 1, 1]:
        assert torch.equal(theirs.generate(ids, past_key_values=cache, **beams), theirs.generate(ids, **beams))
    else:
        with pytest.raises(ValueError, match=r"must begin with the tokens|as many rows as are generated"):
            theirs.generate(ids, past_key_values=cache, **beams)


def test_a_cache_that_calls_would_not_use_is_refused(pair):
    _, theirs = pair()
    ids, cache = tokens(1, 9), GeckoCache()
    with torch.no_grad():
        theirs(ids[:, :5], past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache must not be False if a cache is given"):
        theirs.generate(ids, past_key_values=cache, use_cache=False, **GREEDY)


def test_a_state_goes_to_the_tokens_device_when_it_is_handed_in(pair, monkeypatch):
    """It is moved once, not at every token."""
    ours, theirs = pair()
    with torch.no_grad():
        _, state = ours(tokens(1, 20))
    went, to = [], gecko.GeckoState.to
    monkeypatch.setattr(gecko.GeckoState, "to", lambda self, device: (went.append(device), to(self, device))[1])
    theirs.generate(tokens(1, 5), attention_mask=torch.ones(1, 5), past_key_values=GeckoCache(state), **GREEDY)
    assert went == [torch.device("cpu")]


def test_cache_rows(pair):
    ours, _ = pair()
    with torch.no_grad():
        cache = GeckoCache(state := ours(tokens(3, 20))[1])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 0]))
    expected = state.rows([2, 0]).tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in cache.state.tensors().items())
    cache.reset()
    assert (cache.get_seq_length(), cache.state) == (0, None)


def test_assisted_generation_is_refused(pair):
    _, theirs = pair()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        theirs.generate(tokens(1, 9), attention_mask=torch.ones(1, 9), **GREEDY, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="cannot go back"):
        GeckoCache().crop(-1)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_a_string_stops(options, text_folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(text_folder).eval(), byte_tokenizer()
    inputs = tokenizer("def f", return_tensors="pt")
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 257, **options}
    whole = model.generate(**inputs, **greedy)[0].tolist()
    at = next(i for i, token in enumerate(whole) if i > 7 and 32 < token < 127)
    out = model.generate(**inputs, **greedy, stop_strings=[chr(whole[at])], tokenizer=tokenizer)[0].tolist()
    assert whole[at] in out[6:]
    if options:
        return
    stopped = whole[: whole.index(whole[at], 6) + 1]
    assert out == stopped
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    del greedy["pad_token_id"]
    made = write("def f", stop_sequence=chr(whole[at]), return_tensors=True, **greedy)
    assert made[0]["generated_token_ids"] == stopped


@pytest.mark.parametrize("texts", [["def f"], ["def f", "a longer prompt"]])
def test_token_healing(texts, text_folder):
    """Each byte is the only token that starts with it, so nothing is healed. A prompt still starts with the
    document-start token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(text_folder).eval(), byte_tokenizer()
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 257}
    healed = model.generate(**inputs, **greedy, token_healing=True, tokenizer=tokenizer)
    assert torch.equal(healed, model.generate(**inputs, **greedy))


def test_the_decoder_in_c_takes_the_model_of_transformers(text_folder):
    ours, theirs = gecko.load(text_folder).eval(), AutoModelForCausalLM.from_pretrained(text_folder).eval().model.gecko
    assert decoder_of(theirs, theirs.empty_state()) == decoder_of(ours, ours.empty_state())
    prompt = tokens(1, 30)[0]
    made = [gecko.generate(model, prompt, max_new_tokens=12, temperature=0).tokens for model in (ours, theirs)]
    assert made[0] == made[1]


def test_a_subclass_of_its_blocks_decodes_in_pytorch(text_folder):
    model = AutoModelForCausalLM.from_pretrained(text_folder).eval().model.gecko

    class Other(type(model.blocks[0])):
        pass

    model.blocks[0].__class__ = Other
    assert decoder_of(model, model.empty_state()) is None
