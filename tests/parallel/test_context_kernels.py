"""Ranks that share rows run the C kernels that one device runs, and compute what it computes in float64."""

import pytest
from support.context_cases import Text, assert_one_device, model_for_kernels, read, read_on_kernels
from support.native_agreement import needs_compiler

pytestmark = needs_compiler

EXPECTED = {
    f"{name}_{direction}"
    for name in ("timestep_norm", "cema", "working_memory_chain", "working_memory_read", "chunk_attention")
    for direction in ("forward", "backward")
} - {"working_memory_chain_forward", "working_memory_read_forward"} | {"working_memory_chain", "working_memory_read"}


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        ("gecko", Text(4, 2, "few")), ("gecko", Text(2, 3, "around", read=16)), ("gecko", Text(4, 1)),
        ("cumulative", Text(4, 2, "many")), ("window", Text(2, 2, "borders")),
        ("separate", Text(4, 1, "around")),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_with_c_kernels_are_one_device(on_four_ranks, variant, text):
    checkpointing = "full" if text.chunks == 2 else "none"
    parts = on_four_ranks(read_on_kernels, variant, text, checkpointing, "cpu")[-text.ranks :]
    assert_one_device(parts, read(variant, text, "none", None, model_for_kernels(variant).double()), near=True)
    assert set(parts[0]["ran"]) >= EXPECTED
