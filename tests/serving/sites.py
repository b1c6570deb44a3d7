"""Real servers of a small model, on the loopback interface, and waiting for what they do."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import openai
import torch
from pydantic import BaseModel, ConfigDict, Field

import gecko
from gecko.data import Tokenizer
from gecko.serving.app import Service
from gecko.serving.options import Options
from gecko.serving.server import Server, build_service, open_socket

PATIENCE = 30.0
JSON = {"Content-Type": "application/json"}
OK = {"prompt": "abc", "max_tokens": 3}
"""A valid request."""
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0}


class City(BaseModel):
    """A city, whose texts are short, so that the small model ends them."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=9)
    size: int = Field(ge=0, le=99)
    capital: bool


def until(holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()`` is true; fail after ``PATIENCE`` seconds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def alone(model: gecko.Gecko, ids: list[int], tokens: int, **options: Any) -> str:
    """Return the text of ``gecko.generate``; the server must return the same."""
    return bytes(gecko.generate(model, ids, max_new_tokens=tokens, **options).tokens[0]).decode()


def document(text: str) -> list[int]:
    return [256, *text.encode()]


def greedy(model: gecko.Gecko, text: str, tokens: int) -> str:
    """Return the most likely continuation of a document that begins with ``text``."""
    return alone(model, document(text), tokens, temperature=0)


def distributions(model: gecko.Gecko, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities (len(ids), V) of the tokens after each, from one call of the model."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0].double().log_softmax(-1)


@dataclass(frozen=True)
class Site:
    """A running server."""

    service: Service
    server: Server
    url: str

    @cached_property
    def openai(self) -> openai.OpenAI:
        headers = {"Connection": "close"}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, default_headers=headers)

    @cached_property
    def client(self) -> httpx2.Client:
        """One client for all requests, each on a connection of its own: reading certificates takes longer."""
        return httpx2.Client(base_url=self.url, verify=False, timeout=60, headers={"Connection": "close"})

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def post(self, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
        return self.client.post(path, **options)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), PATIENCE)

    def talk(self, message: bytes, *, ends: bool = False) -> bytes:
        """Send a message, end this side if it ``ends``, and return all that is sent until the connection is closed."""
        found = bytearray()
        with self.connect() as connection, suppress(OSError):  # the server may close it before it has read all
            with suppress(OSError):
                connection.sendall(message)
                if ends:
                    connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        return bytes(found)

    def numbers(self) -> dict[str, float]:
        """Return all values of ``/metrics``, by name with labels."""
        lines = self.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def wait_until_idle(self) -> None:
        """Wait until no row, no place in the queue and no request is left; fail if this does not happen in time."""
        until(lambda: self.numbers()["gecko_rows_active"] + self.numbers()["gecko_queue_length"] == 0)
        until(lambda: self.service.admission.taken == 0)


@contextmanager
def serving(model: gecko.Gecko, tokenizer: Tokenizer, folder: Path, **options: Any) -> Iterator[Site]:
    settings = Options(**{"name": "small", "prefix_cache_bytes": 0, "grace_seconds": 5, **options})
    service = build_service(model, tokenizer, folder, settings)
    server = Server(service, settings)
    with open_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        yield Site(service, server, f"http://127.0.0.1:{listening.getsockname()[1]}")
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def head_of(headers: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """Return the head of a request with a JSON body."""
    kind = "Content-Type: application/json\r\n" if method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{headers}\r\n\r\n".encode()


def check_error(response: httpx2.Response, status: int, told: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert told in error["message"], error["message"]
    assert len(response.text) < 1000
