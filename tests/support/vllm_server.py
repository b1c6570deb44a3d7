"""``vllm serve`` in a process of its own. Needs the standard library only."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def vllm_serve(
    command: Path, folder: Path, log: Path, *options: str, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Serve a model folder with the program ``vllm`` until the end of the context; yield the address of the API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(command), "serve", str(folder), *place, *options], stdout=output, stderr=output, env=environment
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-5000:]
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start in time: {log.read_text()[-5000:]}")
