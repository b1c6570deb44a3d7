"""Two ranks: tensor parallelism over heads and channels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.vllm_texts import expected, prompt

COMMON = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64}


def run(folder: Path, texts: list[list[int]], new: int, **settings: object) -> list[list[int]]:
    """Return the tokens of an engine in another process."""
    job = {"settings": {"model": str(folder), **COMMON, **settings}, "prompts": texts, "new": new}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("engine_job.py")], input=json.dumps(job), capture_output=True,
        text=True, timeout=300, env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    (result,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: list[list[int]] = json.loads(result.removeprefix("RESULT"))
    return found


def test_tensor_parallel(folder, model):
    texts = [prompt(n) for n in (1, 16, 33, 64, 200)]
    found = run(folder, [text.tolist() for text in texts], 30, tensor_parallel_size=2)
    assert found == [expected(model, text, 30) for text in texts]
