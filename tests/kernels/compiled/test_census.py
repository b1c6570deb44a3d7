"""Machine code of a training step for sm_90: products use tensor cores, and activations move 128 bits at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernels.compiling import compiled
from kernels.recording import model_on_nothing, recorded, train
from kernels.sass import Code, Loop

from gecko import GeckoConfig

PRODUCTS = {
    "cema.triton_forward.filter_kernel": "HMMA", "cema.triton_backward.gradients_kernel": "HMMA",
    "chunk_attention.triton_wide._log_sum_kernel": "HGMMA", "chunk_attention.triton_wide._weights_kernel": "HGMMA",
    "chunk_attention.triton_wide._score_grads_kernel": "HGMMA", "working_memory.triton_chain._chain_kernel": "HGMMA",
    "working_memory.triton_chain._chain_backward_kernel": "HGMMA",
}  # fmt: skip
"""Tensor-core instruction of each kernel with products. Those of CEMA are a batch of small ones, one per channel."""

NARROW = {
    "cema.triton_backward.response_kernel", "cema.triton_backward.coefficient_gradients_kernel",
    "cema.triton_coefficients._coefficients_kernel", "cema.triton_coefficients._gradients_kernel",
}  # fmt: skip
"""Kernels over coefficients."""


TRANSPOSED = {"cema.triton_forward.filter_kernel", "cema.triton_backward.gradients_kernel"}
"""Kernels that transpose activations of 16 bits from time to channels through shared memory, two bytes at a time."""


@pytest.fixture(scope="module")
def codes() -> dict[str, list[Code]]:
    """Return the code of each kernel that trains a block of gecko-7b in bfloat16, in all its configurations."""
    config = replace(GeckoConfig.preset("gecko-7b"), num_layers=1, vocab_size=264)
    model = model_on_nothing(config)
    found: dict[str, list[Code]] = {}
    for configuration in recorded(lambda: train(model, 2 * config.chunk_size + 14, "bfloat16", documents=False)):
        function = configuration.kernel.fn
        name = f"{function.__module__.removeprefix('gecko.ops.')}.{function.__name__}"
        found.setdefault(name, []).append(Code.of(compiled(configuration, 90).asm["cubin"]))
    return found


def test_products_use_tensor_cores(codes):
    found = {
        name: unit for name, of in codes.items() for unit in ("HGMMA", "HMMA")
        if all(code.has(lambda x, unit=unit: x.kind == unit) for code in of)
    }  # fmt: skip
    assert found == PRODUCTS


def test_activations_move_128_bits_at_a_time(codes):
    wide = {
        name for name, of in codes.items()
        if all(code.has(lambda x: x.kind in ("LDG", "LDGSTS") and "128" in x.name) for code in of)
    }  # fmt: skip
    assert codes.keys() - wide == NARROW & codes.keys()
    halves = {
        (name, x.kind) for name, of in codes.items() for code in of for x in code.instructions if "U16" in x.name
    }  # fmt: skip
    assert {name for name, _ in halves} == TRANSPOSED & codes.keys()
    assert {kind for _, kind in halves} <= {"LDS", "STS"}, "in shared memory only"


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, [R2] ;
        /*0020*/                   FADD R4, R4, R5 ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/               @P1 BRA 0x10 ;
        /*0050*/                   EXIT ;
        /*0060*/                   BRA 0x60;
        /*0070*/                   NOP;
"""


def test_loops_multiply_instructions():
    code = Code.parse(LISTING)
    assert code.loops == [Loop(0x10, 0x40), Loop(0x20, 0x30)]
    assert [code.depth(loop) for loop in code.loops] == [0, 1]
    assert code.executed([3, 5]) == 3 + 3 * (2 + 5 * 2)
    assert code.executed([3, 5], lambda x: x.kind == "FADD") == 15
    with pytest.raises(ValueError, match="2 depths"):
        code.executed([3])
    with pytest.raises(ValueError, match="instructions"):
        Code.parse("")
