"""Ranks that share rows launch the kernels that one device launches, and compute what it computes in float64."""

from __future__ import annotations

import os

import pytest
from kernels.interpreted.conftest import read_interpreted
from support.context_cases import Text, assert_one_device, model_for_kernels, read
from support.jobs import Jobs

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the simulator runs kernels of one process only"
)

EXPECTED = {
    "normalise_tiles", "gradients", "filter_kernel", "gradients_kernel", "_chain_kernel", "_chain_backward_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs(4)
    yield jobs
    jobs.close()


@pytest.mark.parametrize(
    ("variant", "text"),
    [("gecko", Text(4, 2, "few", batch=1)), ("window-linear", Text(2, 2, "few", read=16, batch=1))],
    ids=str,
)
def test_ranks_with_kernels_are_one_device(jobs, variant, text):
    with jobs.connected(text.ranks) as on_ranks:
        parts = on_ranks(read_interpreted, variant, text, "full", 1)
    assert_one_device(parts, read(variant, text, "none", None, model_for_kernels(variant, 1).double()), near=True)
    assert set(parts[0]["ran"]) >= EXPECTED
