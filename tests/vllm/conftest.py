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
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 12,
    "num_gpu_blocks_override": 13, "disable_log_stats": False, "seed": 0,
}  # fmt: skip
"""Settings of all engines: long prompts are read in pieces of 64 tokens, and every sequence soon gets a used page."""


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


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Return a function that starts an engine in this process and ends the one before, unless its settings are the
    same: then it goes on. The last one ends with the module."""
    running: list[tuple[dict[str, Any], Any]] = []

    def end() -> None:
        while running:
            running.pop()[1].llm_engine.engine_core.shutdown()
        gc.collect()

    def begin(**settings: Any) -> LLM:
        settings = {"model": str(folder), **COMMON, **settings}
        if not running or running[0][0] != settings:
            end()
            running.append((settings, LLM(**settings)))
        return running[0][1]

    yield begin
    end()
