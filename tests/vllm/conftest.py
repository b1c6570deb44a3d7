"""A small model in a folder, and engines of vLLM on the CPU. Run by ``make test-vllm``, in an environment with vLLM."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

import pytest
import torch
from vllm import LLM

import gecko
from gecko.hf import byte_tokenizer, export

CHUNK = 16
COMMON = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8,
    "disable_log_stats": False, "seed": 0,
}  # fmt: skip
"""Settings of all engines; long prompts are read in pieces of 64 tokens."""


@pytest.fixture(scope="session")
def model() -> gecko.Gecko:
    torch.manual_seed(0)
    return gecko.Gecko(gecko.GeckoConfig.preset("tiny", chunk_size=CHUNK))


@pytest.fixture(scope="session")
def folder(model: gecko.Gecko, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of ``gecko.hf`` with a tokenizer."""
    folder = tmp_path_factory.mktemp("export") / "gecko-tiny"
    export(model, folder, byte_tokenizer())
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Return a function that starts an engine in this process; it ends with the test."""
    engines: list[Any] = []

    def begin(**settings: Any) -> LLM:
        end()
        engines.append(LLM(**{"model": str(folder), **COMMON, **settings}))
        return engines[-1]

    def end() -> None:
        while engines:
            engines.pop().llm_engine.engine_core.shutdown()
        gc.collect()

    yield begin
    end()
