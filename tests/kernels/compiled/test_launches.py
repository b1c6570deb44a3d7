"""Launches of models compile and fit the cards: for presets and variants, in training, prefill and decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
from kernels.compiling import CAPABILITIES, check
from kernels.recording import Configuration, decode, model_on_nothing, read, recorded, train
from support import cases

from gecko import GeckoConfig
from gecko.ops.norms import norm_of_sum

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

PRESETS = [
    ("gecko-7b", F32, "bfloat16", CAPABILITIES), ("gecko-7b", BF16, "float32", (90,)),
    ("gecko-7b", F32, "float32", (80,)), ("megalodon-7b", F32, "bfloat16", (90,)),
    ("gecko-125m", F32, "bfloat16", (90,)), ("gecko-15m", F32, "bfloat16", CAPABILITIES),
    ("gecko-15m", F16, "float32", (90,)), ("tiny", F32, "bfloat16", (90,)),
]  # fmt: skip
"""Preset, dtype of weights, precision (bfloat16 is autocast) and capabilities. gecko-1b has the heads of gecko-7b."""

REGISTERS = {
    "cema.triton_backward": 128, "cema.triton_coefficients": 64, "cema.triton_forward": 64,
    "chunk_attention.triton_layout": 96, "chunk_attention.triton_narrow": 255, "chunk_attention.triton_wide": 255,
    "decoding.triton_mixer": 168, "decoding.triton_products": 255, "decoding.triton_rows": 64,
    "feed_forward.triton": 128, "gates.triton": 128, "loss.triton": 128, "norms.triton": 128,
    "qk_scale_shift.triton": 128, "timestep_norm.triton": 224, "timestep_norm.triton_backward": 255,
    "working_memory.triton": 168, "working_memory.triton_chain": 168,
}  # fmt: skip
"""Largest number of registers per thread (at most 255), by the module of the kernel."""

MORE = {
    "filter_kernel": (232, 255), "gradients_kernel": (232, 255), "_row_dot_kernel": (255, 255),
    "enter_kernel": (255, 255), "average_kernel": (96, 96), "_chain_kernel": (255, 255),
    "_chain_backward_kernel": (255, 255),
}  # fmt: skip
"""Kernels with their own limits, for activations of 16 and of 32 bits. CEMA's kernels over tokens run one block per
multiprocessor. ``enter_kernel`` works at the ends of chunks only."""


OLDEST = {"normalise_tiles": 232} if triton.__version__.startswith("3.6.") else {}
"""Kernels that need more registers with the oldest supported Triton; as many blocks fit on a multiprocessor."""


def _budget(configuration: Configuration) -> int:
    if configuration.kernel.__name__ in OLDEST:
        return OLDEST[configuration.kernel.__name__]
    module = configuration.kernel.fn.__module__.removeprefix("gecko.ops.")
    rough = any(kind in ("*bf16", "*fp16") for _, kind in configuration.signature)
    narrow, wide = MORE.get(configuration.kernel.__name__, (REGISTERS[module],) * 2)
    return narrow if rough else wide


def _check(calls: list[Callable[[], None]], capabilities: tuple[int, ...]) -> None:
    found = dict.fromkeys(x for call in calls for x in recorded(call))
    for configuration in found:
        for capability in capabilities:
            # ptxas keeps 8 bytes on the stack in a few tiles of norms, at any number of warps.
            check(configuration, capability, registers=_budget(configuration), spilled=8)


def _one_layer(preset: str) -> GeckoConfig:
    return replace(GeckoConfig.preset(preset), num_layers=1, vocab_size=264)


@pytest.mark.parametrize("how", [train, read])
@pytest.mark.parametrize(("preset", "dtype", "precision", "capabilities"), PRESETS)
def test_launches_of_presets_fit(preset, dtype, precision, capabilities, how):
    config = _one_layer(preset)
    model, length = model_on_nothing(config, dtype), 2 * config.chunk_size + 14
    _check([lambda docs=docs: how(model, length, precision, documents=docs) for docs in (False, True)], capabilities)


WIDE = ("gecko", "window-linear", "cumulative", "llama-window")
"""Variants that are trained in 32 bits as well: both memories and norms, and each pattern of attention."""


@pytest.mark.parametrize(
    ("variant", "precision"),
    [*((variant, "bfloat16") for variant in cases.VARIANTS), *((variant, "float32") for variant in WIDE)],
)
def test_launches_of_variants_fit(variant, precision):
    model = model_on_nothing(replace(cases.SMALL, **cases.VARIANTS[variant], num_layers=1))
    calls = [
        lambda how=how, docs=docs: how(model, 3 * cases.CHUNK + 5, precision, documents=docs)
        for how in (train, read) for docs in (False, True)
    ]  # fmt: skip
    _check(calls, (90,))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_launches_of_the_norms_of_wide_models_fit(dtype):
    """Rows of 8,192 features, the residual stream of a Llama of 70 B, in float32."""

    def call() -> None:
        x, branch = (torch.zeros(2, 8192, dtype=t, requires_grad=True) for t in (F32, dtype))
        y, total = norm_of_sum([x, branch], torch.zeros(8192, requires_grad=True), None, 1, 1e-5, False, dtype)
        (y.sum() + total.sum()).backward()

    for configuration in recorded(call):  # 16 bytes on the stack, with all registers of a multiprocessor
        check(configuration, 86, registers=128, spilled=16)


def _llama(width: int, heads: int, key_heads: int, ffn: int, **changes: object) -> GeckoConfig:
    given = {
        **cases.LLAMA, "vocab_size": 264, "num_layers": 1, "chunk_size": 1024, "sinks": 1, "query_key_bias": False,
        "bfloat16_window": True, "model_dim": width, "key_dim": width, "value_dim": width, "num_heads": heads,
        "key_value_heads": key_heads, "ffn_dim": ffn,
    }  # fmt: skip
    return GeckoConfig(**{**given, **changes})


LLAMAS = {
    "SmolLM2": _llama(576, 9, 3, 1536),
    "Qwen3": _llama(1024, 16, 8, 3072, key_dim=2048, value_dim=2048, query_key_norm=True),
    "Llama 3": _llama(4096, 32, 8, 14_336),
    "Qwen2.5": _llama(3584, 28, 4, 18_944),
    "student": _llama(576, 9, 3, 1536, memory="adaptive", memory_gate_channels=1, sinks=64),
}
DECODED = [
    ("gecko-7b", BF16, 1, CAPABILITIES), ("gecko-7b", BF16, 32, (86, 90)), ("gecko-1b", F32, 1, (90,)),
    ("gecko-125m", F32, 65, (90,)), ("megalodon-7b", BF16, 4, (90,)),
    *((name, BF16, rows, places) for name in LLAMAS for rows, places in ((1, CAPABILITIES), (65, (86, 90)))),
    ("SmolLM2", F32, 4, (90,)), ("student", F32, 4, (90,)),
    *((name, F32, 2, (90,))
      for name in ("no-memory", "cumulative", "window", "llama-window", "shared-keys", "separate")),
]  # fmt: skip
"""Preset, Llama or variant, dtype of weights, rows, and capabilities."""


@pytest.mark.parametrize(("name", "dtype", "rows", "capabilities"), DECODED)
def test_launches_of_a_decoded_token_fit(name, dtype, rows, capabilities):
    if name in cases.VARIANTS:
        config = replace(cases.SMALL, **cases.VARIANTS[name], num_layers=1)
    else:
        config = LLAMAS[name] if name in LLAMAS else _one_layer(name)
    _check([lambda: decode(model_on_nothing(config, dtype), rows)], capabilities)
