"""Ranks that share rows launch the kernels that one device launches, and compute what it computes in float64."""

from __future__ import annotations

import os

import pytest
from kernels.ranks import read_interpreted
from support.context_cases import Text, assert_near, model_for_kernels, read
from support.processes import Processes

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the simulator runs kernels of one process only"
)

EXPECTED = {
    "normalise_tiles", "gradients", "filter_kernel", "gradients_kernel", "_chain_kernel", "_chain_backward_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return a function from a number of ranks to as many processes."""
    started: dict[int, Processes] = {}

    def of(ranks: int) -> Processes:
        if ranks not in started:
            started[ranks] = Processes(ranks, tmp_path_factory.mktemp("context"))
        return started[ranks]

    yield of
    for some in started.values():
        some.close()


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        ("gecko", Text(2, 2, "few", batch=1)),
        ("gecko", Text(4, 2, "few", batch=1)),
        ("window-linear", Text(2, 2, "few", read=16, batch=1)),
    ],
    ids=str,
)
def test_ranks_with_kernels_are_one_device(processes, variant, text):
    parts = processes(text.ranks).run(read_interpreted, variant, text, "full", 1)
    assert_near(parts, read(variant, text, "none", None, model_for_kernels(variant, 1).double()))
    assert set(parts[0]["ran"]) >= EXPECTED
