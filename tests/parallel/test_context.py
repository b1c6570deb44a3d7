"""Ranks that share rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cases
from support.context_cases import (
    EXACT,
    Text,
    assert_one_device,
    assert_same,
    autocast_losses,
    batches,
    prefill,
    prefill_on_ranks,
    read,
    read_shards,
    read_whole,
    refusal,
    slice_refusal,
)

from gecko.parallel.context import rank_layout
from gecko.segments import Clock, Segments

# ---- Ranks that share rows compute what one device computes, including gradients and states.

EVERY_VARIANT = [Text(4, 2, "around"), Text(2, 1), Text(2, 2, "few", read=3 * cases.CHUNK)]
SOME_VARIANTS = [
    Text(4, 2), Text(2, 3, "many"), Text(4, 3, "borders"), Text(4, 2, "chunks"), Text(4, 1, read=2 * cases.CHUNK),
    Text(4, 1, "few"), Text(4, 9, "few"),
]  # fmt: skip
READINGS = [
    *((variant, text) for variant in cases.ON_RANKS for text in EVERY_VARIANT),
    *((variant, text) for variant in ("gecko", "window-linear", "llama-window") for text in SOME_VARIANTS),
    *((variant, replace(text, bfloat16_window=True)) for variant in ("gecko", "llama") for text in EVERY_VARIANT),
]


@pytest.mark.parametrize(("variant", "text"), READINGS, ids=str)
def test_ranks_of_a_context_group_are_one_device(on_four_ranks, variant, text):
    checkpointing = {1: "none", 2: "full", 3: "selective"}.get(text.chunks, "none")
    parts = on_four_ranks(prefill_on_ranks, variant, text, checkpointing)[-text.ranks :]
    assert_one_device(parts, read(variant, text, "none", None))


@pytest.mark.parametrize(
    ("variant", "checkpointing", "documents"),
    [
        ("gecko", "none", "few"),
        ("gecko", "full", "none"),
        ("window-linear", "selective", "many"),
        ("megalodon", "full", "few"),
    ],
)
def test_sharded_parameters_and_rows_are_one_device(on_four_ranks, variant, checkpointing, documents):
    whole = read_whole(variant, 2, documents)
    for part in on_four_ranks(read_shards, variant, 2, checkpointing, documents):
        assert part["loss"] == pytest.approx(whole["loss"], rel=EXACT)
        for name, wanted in whole["gradients"].items():
            assert_same(part["gradients"][name], wanted, f"gradient {name}")


@pytest.mark.parametrize("variant", ["gecko", "window-linear"])
@pytest.mark.parametrize(
    ("length", "read", "piece", "ranks"), [(200, 0, 16, 4), (203, 13, 8, 4), (70, 0, 64, 2), (5, 3, 8, 4)]
)
def test_a_text_read_by_several_ranks(on_four_ranks, variant, length, read, piece, ranks):
    """For any length and initial state, every rank ends with the logits and state that one rank computes."""
    alone = prefill(variant, length, read, piece, 1)
    for answer in on_four_ranks(prefill, variant, length, read, piece, ranks)[-ranks:]:
        for name, wanted in alone.items():
            assert_same(answer[name], wanted, name)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_layer_posts_four_batches_each_way_and_none_when_it_is_recomputed(on_four_ranks, checkpointing):
    """The model has two layers, and a final norm with a batch of its own."""
    assert on_four_ranks(batches, "gecko", checkpointing) == [(2 * 4 + 1, 2 * 4 + 1)] * 4


def test_products_in_bfloat16(on_four_ranks):
    for shared, alone in on_four_ranks(autocast_losses, "gecko"):
        assert shared == pytest.approx(alone, rel=2e-2)


def test_calls_that_are_not_whole_chunks_are_refused_on_all_ranks_alike(on_four_ranks):
    for call, message in [
        (((8, 8, 16, 8),), "their tokens are"),
        (((12, 12, 12, 12),), "whole chunks of 8"),
        (((8, 8, 8, 8), 3), "stand at a multiple of chunk_size"),
        (((8, 8, 8, 8), 0, (True, False, True, True)), "segment_ids"),
    ]:
        answers = on_four_ranks(refusal, *call)
        assert message in answers[0] and len(set(answers)) == 1
    assert "multiple of ranks" in on_four_ranks(slice_refusal, 40)[0]


@pytest.mark.parametrize(("variant", "field"), [("gekko", "convolution_width"), ("orthogonal", "memory=orthogonal")])
def test_what_ranks_cannot_share_is_refused_by_the_field_s_name(variant, field):
    with pytest.raises(ValueError, match=field):
        cases.model(variant)(cases.tokens(1, 16), context=object())


# ---- The layout of a rank's tokens, and how far back its document reaches, follow from the layout of the whole rows.


@settings(max_examples=200)
@given(
    ranks=st.integers(2, 4), chunks=st.integers(1, 3), chunk=st.integers(2, 4), seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.0, 0.05, 0.3, 1.0]), read=st.sampled_from([None, 0, 2]), has_ids=st.booleans(),
)  # fmt: skip
def test_each_rank_knows_where_it_stands_and_how_far_back_its_document_reaches(
    ranks, chunks, chunk, seed, rate, read, has_ids
):
    generator, size, batch, clock = torch.Generator().manual_seed(seed), chunks * chunk, 3, None
    ids = (torch.rand(batch, ranks * size, generator=generator) < rate).long().cumsum(1) if has_ids else None
    if read is not None:
        position = torch.full((batch,), read * chunk)
        clock = Clock(position, position // 2, torch.randint(2, (batch,), generator=generator))
    whole = Segments.build(batch, ranks * size, segment_ids=ids, clock=clock)
    start_of_call = int(whole.clock.position[0])
    for rank in range(ranks):
        part, counts, reach = rank_layout(whole, ids, rank, ranks, chunk)
        own = None if ids is None else ids[:, rank * size : (rank + 1) * size]
        here = Segments.build(batch, size, segment_ids=own, clock=None if rank == 0 and read is None else part.clock)
        assert torch.equal(part.clock.position, whole.clock.position + rank * size)
        assert torch.equal(here.document_starts, whole.document_starts[:, rank * size : (rank + 1) * size])
        for got, wanted in zip(part.end.tensors().values(), here.end.tensors().values(), strict=True):
            assert torch.equal(got, wanted)
        assert (part.starts is None) == (here.starts is None) and part.at_start == here.at_start
        assert part.starts is None or np.array_equal(part.starts, here.starts)
        begins = whole.starts is not None and rank + 1 < ranks
        assert part.next_begins.tolist() == (whole.starts[:, (rank + 1) * size].tolist() if begins else [False] * batch)
        for row in range(batch):
            starts = whole.document_starts[row].tolist()
            for before in range(ranks - 1):
                other = rank - 1 - before
                if other < 0:
                    assert int(counts[before, row]) == 0 and not reach[before, row].any()
                    continue
                running = starts[rank * size - 1]
                held = [t for t in range(other * size, (other + 1) * size) if start_of_call + t >= running]
                earlier = max(0, start_of_call - running) if other == 0 else 0
                assert int(counts[before, row]) == len(held) + earlier
                # The document that holds the last token before the chunk that precedes this rank's part.
                at = rank * size - chunk - 1
                began = starts[at] if at >= 0 else int(whole.clock.document_start[row])
                end = start_of_call + (other + 1) * size
                assert reach[before, row].tolist() == [began < end - chunk, began < end]
