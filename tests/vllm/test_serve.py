"""``vllm serve FOLDER``: OpenAI's route on two replicas (data parallelism)."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.vllm_server import vllm_serve
from support.vllm_texts import expected, prompt

SETTINGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "64"]


def ask(address: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_completions_of_two_replicas(folder, model, tmp_path):
    texts = [prompt(n, seed=3) for n in (1, 17, 65, 130, 200, 40, 90, 5)]
    command, two = Path(sys.executable).with_name("vllm"), ("--data-parallel-size", "2")
    # vLLM 0.33 gives each replica a memory node of its own unless the last variable is set, whatever its value.
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_SIM_MULTI_NUMA": "0",
    }  # fmt: skip
    with (
        vllm_serve(command, folder, tmp_path / "log", *SETTINGS, *two, environment=environment) as address,
        ThreadPoolExecutor(8) as clients,
    ):
        asked = {"model": str(folder), "max_tokens": 20, "return_token_ids": True}
        answers = list(clients.map(lambda text: ask(address, prompt=text.tolist(), **asked), texts))
        text = ask(address, prompt="def main(", **asked)
    assert [one["choices"][0]["token_ids"] for one in answers] == [expected(model, text, 20) for text in texts]
    assert text["choices"][0]["prompt_token_ids"] == [256, *b"def main("]
