"""Prefill gives the same result for any division of the prompt, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.inference import piece_length, read


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 264, (length,), generator=torch.Generator().manual_seed(seed))


def test_the_reading_is_what_one_call_of_the_model_gives(model: gecko.Gecko) -> None:
    tokens = prompt(70)
    with torch.no_grad():
        logits, state = model(tokens.unsqueeze(0))
    reading = read(model, [tokens])
    torch.testing.assert_close(reading.logits, logits[0, -1])
    for name, tensor in reading.state.tensors().items():
        torch.testing.assert_close(tensor, state.tensors()[name], msg=name)


@settings(max_examples=25)
@given(
    length=st.integers(1, 90), cuts=st.lists(st.integers(0, 90), max_size=5), piece=st.integers(1, 100), data=st.data()
)
def test_neither_pieces_nor_parts_matter(
    model: gecko.Gecko, length: int, cuts: list[int], piece: int, data: st.DataObject
) -> None:
    tokens = prompt(length)
    whole = read(model, [tokens])
    parts = list(torch.tensor_split(tokens, sorted(cuts)))
    cut = read(model, parts, piece=piece)
    assert cut.state.position == [length]
    torch.testing.assert_close(cut.logits, whole.logits, rtol=1e-4, atol=1e-4)
    for name, tensor in cut.state.tensors().items():
        torch.testing.assert_close(tensor, whole.state.tensors()[name], rtol=1e-4, atol=1e-4, msg=name)


def test_pieces_end_at_multiples_of_their_length_wherever_the_state_stands(
    model: gecko.Gecko, calls: list[tuple[int, int]]
) -> None:
    state = read(model, [prompt(5)]).state
    read(model, [prompt(30), prompt(20)], state, piece=16)
    assert calls == [(1, length) for length in (5, 11, 16, 16, 7)]


def test_a_piece_is_whole_windows() -> None:
    for name, chunk, expected in (("tiny", 64, 4096), ("gecko-7b", 2048, 4096), ("megalodon-7b", 4096, 8192)):
        assert piece_length(gecko.GeckoConfig.preset(name, chunk_size=chunk)) == expected


def test_parts_are_taken_when_they_are_needed(model: gecko.Gecko) -> None:
    taken, ahead = 0, []
    hidden = model.hidden

    def parts() -> Iterator[Tensor]:
        nonlocal taken
        for _ in range(40):
            taken += 10
            yield prompt(10)

    def watched(tokens: Tensor, **more: object) -> object:
        result = hidden(tokens, **more)
        ahead.append(taken - result[1].position[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "hidden", watched)
        read(model, parts(), piece=32)
    assert len(ahead) == 13
    assert max(ahead) < 10


def test_memory_does_not_grow_with_the_text(model: gecko.Gecko) -> None:
    process = psutil.Process()

    def resident_after(tokens: int) -> int:
        nonlocal state
        state = read(model, (prompt(4096, i) for i in range(tokens // 4096)), state, piece=512).state
        return process.memory_info().rss

    state = None
    before = resident_after(8 * 4096)
    size = state.num_bytes
    after = resident_after(24 * 4096)
    assert state.num_bytes == size
    assert after - before < 16e6


def test_the_model_keeps_its_mode(model: gecko.Gecko) -> None:
    modes = []
    handle = model.blocks[0].register_forward_pre_hook(lambda block, _: modes.append(block.training))
    model.train()
    read(model, [prompt(3)])
    handle.remove()
    assert modes == [False]
    assert model.training


def test_a_prompt_without_tokens_is_refused(model: gecko.Gecko) -> None:
    state = read(model, [prompt(3)]).state
    for before in (None, state):
        with pytest.raises(ValueError, match="at least one token"):
            read(model, [torch.empty(0, dtype=torch.int64)], before)


@pytest.mark.parametrize("wrong", [-1, 264, 2**40])
def test_ids_out_of_range_are_refused(model: gecko.Gecko, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"a prompt must be ids in 0\.\.263; got {wrong}"):
        read(model, [torch.tensor([1, wrong])])


def test_tokens_of_a_wrong_kind_are_refused(model: gecko.Gecko) -> None:
    for wrong in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64), torch.tensor(3), torch.tensor([True])):
        with pytest.raises(TypeError, match="1-D integers"):
            read(model, [wrong])


def test_a_state_of_several_rows_is_refused(model: gecko.Gecko) -> None:
    with pytest.raises(ValueError, match="one row; got 3"):
        read(model, [prompt(3)], model.empty_state(3))
