"""Ranks that share rows compute what one device computes, including gradients and states."""

from __future__ import annotations

import numpy as np
import pytest
from support import cases
from support.context_cases import (
    Text,
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

TOLERANCE = 1e-9


def assert_same(got, wanted, name):
    if wanted.dtype.kind != "f":
        assert np.array_equal(got, wanted), name
        return
    finite = wanted[np.abs(wanted) < 1e20]  # the log of an empty sum is −1e30
    scale = max(1.0, np.abs(finite).max()) if finite.size else 1.0
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name)


def assert_is_single(parts, whole):
    for name in ("hidden", "losses", "logits"):
        assert_same(np.concatenate([part[name] for part in parts], axis=1), whole[name], name)
    for part in parts:
        assert part["loss"] == parts[0]["loss"]
        assert part["loss"] == pytest.approx(whole["loss"], rel=TOLERANCE)
        for name, wanted in whole["gradients"].items():
            assert_same(part["gradients"][name], wanted, f"gradient {name}")
    for kind in ("state", "inferred"):
        for name, wanted in whole[kind].items():
            assert_same(parts[-1][kind][name], wanted, f"{kind} {name}")


EVERY_VARIANT = [Text(4, 2, "around"), Text(2, 1), Text(2, 2, "few", read=3 * cases.CHUNK)]
SOME_VARIANTS = [
    Text(4, 2), Text(2, 3, "many"), Text(4, 3, "borders"), Text(4, 2, "chunks"), Text(4, 1, read=2 * cases.CHUNK),
    Text(4, 1, "few"), Text(4, 9, "few"),
]  # fmt: skip
READINGS = [
    *((variant, text) for variant in cases.ON_RANKS for text in EVERY_VARIANT),
    *((variant, text) for variant in ("gecko", "window-linear") for text in SOME_VARIANTS),
]


@pytest.mark.parametrize(("variant", "text"), READINGS, ids=str)
def test_ranks_of_a_context_group_are_one_device(on_four_ranks, variant, text):
    checkpointing = {1: "none", 2: "full", 3: "selective"}.get(text.chunks, "none")
    answers = on_four_ranks(prefill_on_ranks, variant, text, checkpointing)
    whole = read(variant, text, "none", None)
    for first in range(0, 4, text.ranks):
        assert_is_single(answers[first : first + text.ranks], whole)


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
        assert part["loss"] == pytest.approx(whole["loss"], rel=TOLERANCE)
        for name, wanted in whole["gradients"].items():
            assert_same(part["gradients"][name], wanted, f"gradient {name}")


@pytest.mark.parametrize("variant", ["gecko", "megalodon", "window-linear"])
@pytest.mark.parametrize(
    ("length", "read", "piece", "ranks"), [(200, 0, 16, 4), (203, 13, 8, 4), (70, 0, 64, 2), (5, 3, 8, 4)]
)
def test_a_text_read_by_several_ranks(on_four_ranks, variant, length, read, piece, ranks):
    """For any length and initial state, every rank ends with the logits and state that one rank computes."""
    for answer in on_four_ranks(prefill, variant, length, read, piece, ranks):
        for name, wanted in answer["alone"].items():
            assert_same(answer["shared"][name], wanted, name)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_layer_posts_four_batches_each_way_and_none_when_it_is_recomputed(on_four_ranks, checkpointing):
    """The model has two layers, and a final norm with a batch of its own."""
    assert on_four_ranks(batches, "gecko", checkpointing) == [(2 * 4 + 1, 2 * 4 + 1)] * 4


@pytest.mark.parametrize("variant", ["gecko", "window-linear"])
def test_products_in_bfloat16(on_four_ranks, variant):
    for shared, alone in on_four_ranks(autocast_losses, variant):
        assert shared == pytest.approx(alone, rel=2e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (((8, 8, 16, 8),), "their tokens are"),
        (((12, 12, 12, 12),), "whole chunks of 8"),
        (((8, 8, 8, 8), 3), "stand at a multiple of chunk_size"),
        (((8, 8, 8, 8), 0, (True, False, True, True)), "segment_ids"),
    ],
)
def test_calls_that_are_not_whole_chunks_are_refused_on_all_ranks_alike(on_four_ranks, call, message):
    answers = on_four_ranks(refusal, *call)
    assert message in answers[0]
    assert len(set(answers)) == 1


def test_rows_that_do_not_divide_are_refused(on_four_ranks):
    assert "multiple of ranks" in on_four_ranks(slice_refusal, 40)[0]
