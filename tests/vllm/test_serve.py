"""``vllm serve FOLDER``: OpenAI's route on two replicas (data parallelism)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.vllm_texts import expected, prompt

SETTINGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "64"]


@contextmanager
def serve(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a folder until the end of the context; return the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--host", "127.0.0.1"]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port), *SETTINGS, *options], stdout=output, stderr=output, env=env
        )
        try:
            wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-5000:]
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start in time: {log.read_text()[-5000:]}")


def ask(address: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_completions_of_two_replicas(folder, model, tmp_path):
    texts = [prompt(n, seed=3) for n in (1, 17, 65, 130, 200, 40, 90, 5)]
    two = "--data-parallel-size", "2"
    with serve(folder, tmp_path / "log", *two) as address, ThreadPoolExecutor(8) as clients:
        asked = {"model": str(folder), "max_tokens": 20, "return_token_ids": True}
        answers = list(clients.map(lambda text: ask(address, prompt=text.tolist(), **asked), texts))
        text = ask(address, prompt="def main(", **asked)
    assert [one["choices"][0]["token_ids"] for one in answers] == [expected(model, text, 20) for text in texts]
    assert text["choices"][0]["prompt_token_ids"] == [256, *b"def main("]
