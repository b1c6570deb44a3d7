"""Engines in processes of their own: with two ranks, and with the decoder of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import LLAMA
from support.vllm_texts import expected, prompt
from torch import Tensor

import gecko

COMMON = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64}


def run(folder: Path, texts: list[Tensor], new: list[int], settings: dict[str, object], **variables: str) -> list[Any]:
    """Return the tokens of an engine in another process, and how many requests it preempted."""
    prompts = [text.tolist() for text in texts]
    job = {"settings": {"model": str(folder), **COMMON, **settings}, "prompts": prompts, "new": new}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("engine_job.py")], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    (result,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: list[Any] = json.loads(result.removeprefix("RESULT"))
    return found


def test_tensor_parallel(folder, model):
    texts = [prompt(n) for n in (1, 16, 33, 64, 200)]
    found, _ = run(folder, texts, [30] * 5, {"tensor_parallel_size": 2}, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert found == [expected(model, text, 30) for text in texts]


@pytest.mark.parametrize(("changes", "count"), [({}, 64), ({**LLAMA, "key_value_heads": 1, "sinks": 1}, 16)])
def test_the_decoder_of_a_gpu(tmp_path, changes, count):
    """Mixed requests, some of 64 preempted, under Triton's interpreter; the host reads nothing of the device."""
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "model_dim": 32, "key_dim": 16, "value_dim": 32, "ffn_dim": 32, "timestep_groups": 2}
    model = gecko.Gecko(gecko.GeckoConfig.preset("tiny", chunk_size=8, **sizes, **changes))
    model.save(tmp_path)
    texts, new = [prompt(1 + 37 * i % 70, seed=i) for i in range(count)], [1 + 5 * i % 12 for i in range(count)]
    settings = {
        "max_num_seqs": 6, "enable_prefix_caching": True, "block_size": 16, "num_gpu_blocks_override": 9,
        "disable_log_stats": False, "skip_tokenizer_init": True,
    }  # fmt: skip
    found, preempted = run(tmp_path, texts, new, settings, TRITON_INTERPRET="1")
    assert found == [expected(model, text, count) for text, count in zip(texts, new, strict=True)]
    assert preempted > 0 or count < 64
