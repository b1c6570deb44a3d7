"""Every row of a batch gets what it would get alone, wherever its padding is."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import tokens

import gecko
from gecko.hf import GeckoCache

LENGTH = 23
IGNORED = -100
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return (padding before, tokens) of every row."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from([0, 0, 1, 7, 15]))
        rows.append((before, draw(st.integers(1, LENGTH - before))))
    return rows


def batch(rows: list[tuple[int, int]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    column = torch.arange(LENGTH)
    mask = torch.stack([(column >= before) & (column < before + length) for before, length in rows])
    # Padding has an id that the model does not have: it must never be read.
    return tokens(len(rows), LENGTH, seed).masked_fill(~mask, 10_000), mask.long()


@settings(max_examples=15)
@given(layouts(), st.booleans(), st.booleans())
def test_rows_are_as_alone(pair, rows, use_cache, after):
    ours, theirs = pair("window-linear" if len(rows) % 2 else "gecko")
    ids, mask = batch(rows, len(rows))
    state, cache = None, GeckoCache() if use_cache or after else None
    with torch.no_grad():
        if after:
            _, state = ours(tokens(len(rows), 9, 5))
            cache = GeckoCache(state)
        out = theirs(ids, attention_mask=mask, past_key_values=cache, use_cache=use_cache)
        for row, (before, length) in enumerate(rows):
            text = ids[row : row + 1, before : before + length]
            expected, then = ours(text, state=None if state is None else state.rows([row]))
            torch.testing.assert_close(out.logits[row, before : before + length], expected[0], rtol=0, atol=1e-11)
            if use_cache:
                kept = out.past_key_values.state.rows([row]).tensors()
                for name, tensor in then.tensors().items():
                    torch.testing.assert_close(kept[name], tensor, rtol=0, atol=1e-11)
        assert not out.logits[row, :before].any()
        after_text = out.logits[row, before + length :]
        last = out.logits[row, before + length - 1].expand_as(after_text)
        torch.testing.assert_close(after_text, last, rtol=0, atol=1e-12)  # rows may be rounded differently
    if use_cache:
        assert out.past_key_values.get_seq_length() == LENGTH
    elif not after:
        assert out.past_key_values is None


@settings(max_examples=6)
@given(layouts())
def test_generated_rows_are_as_alone(pair, rows):
    ours, theirs = pair("chunk" if len(rows) % 2 else "gecko")
    ids, mask = batch(rows, len(rows))
    prompts = [row[text] for row, text in zip(ids, mask.bool(), strict=True)]
    out = theirs.generate(ids, attention_mask=mask, **GREEDY)
    assert out[:, LENGTH:].tolist() == gecko.generate(ours, prompts, max_new_tokens=8, temperature=0).tokens


def test_rows_padded_on_the_right_need_no_cache_and_their_beams_are_as_alone(pair):
    """The tokens made stand after the padding, which then is inside of the text."""
    _, theirs = pair()
    ids, mask = batch([(0, 9), (7, 16), (3, 5)], 3)
    greedy = theirs.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(theirs.generate(ids, attention_mask=mask, **GREEDY, use_cache=False), greedy)
    options = {**GREEDY, "num_beams": 3}
    together = theirs.generate(ids, attention_mask=mask, **options)[:, LENGTH:]
    for row, text, found in zip(ids, mask.bool(), together, strict=True):
        alone = theirs.generate(row[text][None], attention_mask=torch.ones(1, int(text.sum())), **options)
        assert torch.equal(alone[0, int(text.sum()) :], found)


@settings(max_examples=15)
@given(st.data(), st.booleans())
def test_padding_inside_a_text_is_not_read(pair, data, use_cache):
    ours, theirs = pair()
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3)))
    mask[:, data.draw(st.integers(0, 8))] = True
    ids = tokens(len(mask), 9)
    out = theirs(ids.masked_fill(~mask, 10_000), attention_mask=mask, labels=ids, use_cache=use_cache)
    losses = torch.zeros((), dtype=torch.float64)
    for row, text in enumerate(mask):
        alone, _ = ours(ids[row : row + 1, text])
        torch.testing.assert_close(out.logits[row, text], alone[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(out.logits[row, -1], alone[0, -1], rtol=0, atol=1e-11)
        losses += F.cross_entropy(alone[0, :-1], ids[row, text][1:], reduction="sum")
    count = int(mask.sum()) - len(mask)
    torch.testing.assert_close(out.loss, losses / max(count, 1), rtol=0, atol=1e-11)


@settings(max_examples=12)
@given(layouts(), st.lists(st.integers(1, LENGTH - 1), max_size=4), st.booleans())
def test_a_batch_in_chunks_is_the_whole(pair, rows, cuts, after):
    """A chunk may hold only padding of some rows; the last column continues every row in the end."""
    ours, theirs = pair("gecko" if len(rows) % 2 else "chunk-linear")
    ids, mask = batch(rows, len(rows))
    with torch.no_grad():
        state = ours(tokens(len(rows), 9, 5))[1] if after else None
        whole = theirs(ids, attention_mask=mask, past_key_values=GeckoCache(state))
        cache, borders = GeckoCache(state), [0, *sorted(set(cuts)), LENGTH]
        parts = [
            theirs(ids[:, begin:end], attention_mask=mask[:, begin:end], past_key_values=cache).logits
            for begin, end in itertools.pairwise(borders)
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.logits, rtol=0, atol=1e-11)
    expected = whole.past_key_values.state.tensors()
    for name, tensor in cache.state.tensors().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-11)
    assert torch.equal(cache.text, mask.bool())
    for each in (cache, whole.past_key_values):
        each.check(torch.cat([ids, ids[:, :1]], dim=1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_lengths_in_chunks(side, pair):
    _, theirs = pair()
    ids, mask = batch([(0 if side == "right" else LENGTH - length, length) for length in (3, 23, 12)], 3)
    whole = theirs.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(theirs.generate(ids, attention_mask=mask, **GREEDY, prefill_chunk_size=5), whole)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans())
def test_packed_documents(pair, lengths, after):
    """Positions that restart at 0 mark documents, as ``segment_ids`` do; no document is trained on the next one."""
    ours, theirs = pair("chunk-linear" if after else "gecko")
    ids = tokens(1, sum(lengths), len(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0) + 7
    with torch.no_grad():
        state = ours(tokens(1, 11), torch.full((1, 11), 7))[1] if after else None
        out = theirs(ids, position_ids=positions, labels=ids, past_key_values=GeckoCache(state))
        expected, then = ours(ids, segments, state)
    torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-11)
    for name, tensor in then.tensors().items():
        if "segment_id" not in name or after:
            torch.testing.assert_close(out.past_key_values.state.tensors()[name], tensor, rtol=0, atol=1e-11)
    if not after and ids.shape[1] > 1:
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), IGNORED)], dim=1)
        torch.testing.assert_close(out.loss, ours.loss(ids, targets, segments), rtol=0, atol=1e-12)


def test_what_repeats_positions_is_accepted_beside_them(pair):
    _, theirs = pair()
    ids, positions = tokens(1, 6), torch.tensor([[0, 1, 2, 3, 0, 1]])
    with torch.no_grad():
        found = theirs(ids, position_ids=positions, **BORDERS).logits
        assert torch.equal(found, theirs(ids, position_ids=positions).logits)
        theirs(ids, **dict.fromkeys(BORDERS))


def test_gradients_are_those_of_gecko(pair):
    ours, theirs = pair()
    ids = tokens(2, 30)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED)], dim=1)
    names = [name for name, _ in ours.named_parameters()]
    expected = torch.autograd.grad(ours.loss(ids, targets), list(ours.parameters()))
    found = torch.autograd.grad(theirs(ids, labels=ids).loss, list(theirs.parameters()))
    assert len(found) == len(names)
    for name, one, other in zip(names, expected, found, strict=True):
        assert torch.equal(one, other), name


def test_loss_per_item_and_logits_to_keep(pair):
    _, theirs = pair()
    ids = tokens(2, 10)
    labels = ids.clone()
    labels[0, :4] = IGNORED
    with torch.no_grad():
        whole, last = theirs(ids, labels=labels), theirs(ids, labels=labels, logits_to_keep=3)
        items = theirs(ids, labels=labels, num_items_in_batch=50).loss
        some = theirs(ids, logits_to_keep=torch.tensor([1, 4]))
        loss, logits = theirs(ids, labels=labels, use_cache=False, return_dict=False)
    torch.testing.assert_close(items, whole.loss * 15 / 50)
    torch.testing.assert_close(last.logits, whole.logits[:, -3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(some.logits, whole.logits[:, [1, 4]], rtol=0, atol=1e-12)
    assert torch.equal(last.loss, whole.loss)
    assert torch.equal(loss, whole.loss) and torch.equal(logits, whole.logits)


def test_long_prompts_are_read_in_pieces(pair, monkeypatch):
    ours, theirs = pair()
    monkeypatch.setattr("gecko.hf.batch.piece_length", lambda config: 16)
    ids = tokens(2, 50)
    positions = torch.cat([torch.arange(30), torch.arange(20)]).expand(2, -1)
    with torch.no_grad():
        for given_positions, segments in ((None, None), (positions, (positions != torch.arange(50)).long())):
            out = theirs(ids, position_ids=given_positions)
            torch.testing.assert_close(out.logits, ours(ids, segments)[0], rtol=0, atol=1e-11)


ONES = torch.ones(2, 6)
BORDERS = {
    "cu_seq_lens_q": torch.tensor([0, 4, 6]), "cu_seq_lens_k": torch.tensor([0, 4, 6]), "max_length_q": 4,
    "max_length_k": 4, "seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1]]),
}  # fmt: skip
REFUSED = [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, "length of at least 1"),
    ({"input_ids": torch.zeros(4, dtype=torch.int64)}, ValueError, r"shape \(batch, length\)"),
    ({"input_ids": None}, ValueError, "one of input_ids and inputs_embeds .* got neither"),
    ({"input_ids": torch.full((2, 6), 99)}, ValueError, "must be ids in 0..36; got 99"),
    ({"input_ids": torch.rand(2, 6)}, TypeError, "must be integers"),
    ({"attention_mask": torch.ones(2, 5)}, ValueError, r"attention_mask must have the shape of input_ids, \(2, 6\)"),
    ({"attention_mask": torch.ones(2, 7)}, ValueError, r"longer by the 0 columns .* cache; got \(2, 7\)"),
    ({"attention_mask": torch.ones(3, 6)}, ValueError, r"got \(3, 6\)"),
    ({"attention_mask": torch.ones(2, 1, 6, 6)}, ValueError, "no mask between tokens"),
    ({"attention_mask": torch.tensor([[1] * 6, [0] * 6])}, ValueError, "only padding"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2], [1] * 6])}, ValueError, "it has 2. Packed documents are"),
    ({"attention_mask": torch.tensor([[0.0] * 4 + [-1e9] * 2] * 2)}, ValueError, "must be 1 at text and 0 at padding"),
    ({"position_ids": torch.zeros(2, 5).long()}, ValueError, "position_ids must have the shape"),
    ({"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6]])}, ValueError, "they jump"),
    *(
        ({name: value}, ValueError, f"{name} must come with position_ids.*return_position_ids=True")
        for name, value in BORDERS.items()
    ),
    ({"inputs_embeds": torch.zeros(2, 6, 32)}, ValueError, "one of input_ids and inputs_embeds .* got both"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 6, 31)}, ValueError, r"embeddings must .* got \(2, 6, 31\)"),
    ({"output_attentions": True}, ValueError, "output_attentions must be off"),
    ({"output_hidden_states": [7]}, IndexError, "out of range"),
    ({"past_key_values": ()}, TypeError, "must be a GeckoCache; got tuple"),
    ({"past_key_values": GeckoCache(), "cache": GeckoCache()}, ValueError, "names of one argument; got both"),
    ({"token_type_ids": ONES}, TypeError, "takes no argument token_type_ids"),
    ({"labels": torch.zeros(2, 5).long()}, ValueError, "labels must have the shape"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda x: None)
def test_refused(arguments, error, message, pair):
    with pytest.raises(error, match=message), torch.no_grad():
        pair()[1](**{"input_ids": tokens(2, 6), **arguments})


def test_a_cache_of_other_rows_is_refused(pair):
    ours, theirs = pair()
    with torch.no_grad(), pytest.raises(ValueError, match="must hold 3 rows, as input_ids; it holds 2"):
        theirs(tokens(3, 1), past_key_values=GeckoCache(ours(tokens(2, 6))[1]))
