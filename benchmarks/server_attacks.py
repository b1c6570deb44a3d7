"""`gecko serve` under attack: the slowest response of /health, and the memory, during each attack of one client.

    python benchmarks/server_attacks.py --write

The server is a separate process; attacks run one after the other over loopback, from this process. Clients and server
share the machine's processors, so times are higher than those of a server alone.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import parsed, parser_of, publish, serving, settled_numbers, table

import gecko
from gecko.serving.options import Limits

LONGEST = 0.5
"""Largest allowed time of /health in seconds."""
PATIENCE = 12.0
"""Seconds after which a client that waits for a response disconnects."""
MEGABYTE = 1 << 20
BOUND = Limits().memory_bytes + 20 * Limits().body_bytes
"""Limit of added memory in bytes, by docs/server_operations.md: all requests, and one large body in preparation."""
TEMPLATE = "{% if 'loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
TEMPLATE += "{% endfor %}{% endif %}{{ messages[0].content }}"
"""Chat template of the server, which does not end for one kind of message."""
Attack = Callable[[int], "Counter[str]"]


@dataclass
class Watch:
    """Observations during an attack."""

    before: int
    """Memory in use by the server before the attack, in bytes."""
    slowest: float = 0
    peak: int = 0
    failures: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def growth(self) -> int:
        return max(0, self.peak - self.before)

    @property
    def within_bounds(self) -> bool:
        return self.slowest <= LONGEST and self.growth <= BOUND and not self.failures


def send(port: int, message: bytes, read: bool = True) -> str:
    """Send a request; return the status of the response, or what happened to the connection."""
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as connection:
        try:
            connection.sendall(message)
            if not read:
                time.sleep(PATIENCE / 2)
                return "not read"
            return connection.recv(64).split(b" ")[1].decode()
        except TimeoutError:
            return "left"
        except (OSError, IndexError):
            return "closed"


def complete(asked: dict[str, Any] | bytes, times: int = 1, path: str = "/v1/completions", read: bool = True) -> Attack:
    """Return an attack of ``times`` requests at once."""
    content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return raw(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, times, read)


def raw(message: bytes, times: int = 1, read: bool = True) -> Attack:
    def attack(port: int) -> Counter[str]:
        answers: Counter[str] = Counter()
        threads = [threading.Thread(target=lambda: answers.update([send(port, message, read)])) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    return attack


def attacks() -> Iterator[tuple[str, Attack]]:
    """Yield name and attack; each is created when it is needed, because it is large."""
    message, chat = {"role": "user", "content": "a"}, "/v1/chat/completions"
    large = b'{"prompt": "' + b"a" * (15 * MEGABYTE) + b'"}'
    short = {"prompt": "abc", "max_tokens": 1}
    yield "1,000,000 special ids, n = 128", complete({"prompt": [256] * 1_000_000, "n": 128, "max_tokens": 1})
    many = json.dumps({"messages": [message] * 500_000}, separators=(",", ":")).encode()
    yield "500,000 messages", complete(many, path=chat)
    yield "50,000 unknown fields", complete({**short, **{f"field{i}": i for i in range(50_000)}})
    yield "echo of 200 KB, n = 64", complete({"prompt": "a" * 200_000, "n": 64, "echo": True, "max_tokens": 1})
    yield "60 × 15 MB to /health", complete(large, 60, "/health")
    yield "60 × 15 MB to /nothing", complete(large, 60, "/nothing")
    yield "60 × 15 MB to /v1/completions", complete(large, 60)
    yield "20 × 3.9 MB of text", complete({"prompt": "a" * 3_900_000, "max_tokens": 1}, 20)
    yield "5,000,000 ids in 15 MB", complete(b'{"prompt": [' + b",".join([b"42"] * 5_000_000) + b"]}")
    yield "5,000,000 empty lists", complete(b'{"prompt": [' + b",".join([b"[]"] * 5_000_000) + b"]}")
    yield "lists nested 1,000,000 deep", complete(b'{"prompt": ' + b"[" * 1_000_000)
    yield "a number of 15,000,000 digits", complete(b'{"prompt": "a", "seed": ' + b"9" * 15_000_000 + b"}")
    yield "logit_bias of 100,000 ids", complete({**short, "logit_bias": {str(i): 1 for i in range(100_000)}})
    stops = ["a" * 999 + chr(98 + i) for i in range(16)]
    yield (
        "16 stop strings of 1,000 letters, n = 16",
        complete({**short, "n": 16, "max_tokens": 1500, "logit_bias": {"97": 100}, "stop": stops}),
    )
    yield "20 log-probabilities, n = 128", complete({**short, "n": 128, "max_tokens": 4096, "logprobs": 20})
    yield (
        "20 log-probabilities, n = 16, in chat",
        complete({"messages": [message], "n": 16, "max_tokens": 600, "logprobs": True, "top_logprobs": 20}, path=chat),
    )
    yield "65,536 ids, echo", complete({"prompt": [97] * 65_536, "echo": True, "max_tokens": 1})
    yield (
        "100 streams that are not read",
        complete({**short, "max_tokens": 2000, "stream": True, "logprobs": 20}, 100, read=False),
    )
    yield "100 answers that are not read", complete({"prompt": "a" * 1_000_000, "echo": True}, 100, read=False)
    yield "100 headers that do not end", raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", 100)
    yield "100 headers of 4 MB", raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 700_000, 100)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    # The chunks come with a wrong key, as on a server without one.
    yield (
        "10 bodies of 240,000 chunks",
        raw(head + b"Authorization: Bearer wrong\r\n" + chunked + b"1\r\na\r\n" * 240_000, 10),
    )
    chunk = b"100\r\n" + b"a" * 256 + b"\r\n"
    yield "10 bodies of 60,000 chunks of 256 bytes", raw(head + chunked + chunk * 60_000 + b"0\r\n\r\n", 10)
    chunk = b"100;" + b"a" * 15_000 + b"\r\n" + b" " * 256 + b"\r\n"
    yield "10 bodies of 1,000 chunks with names of 15 KB", raw(head + chunked + chunk * 1000 + b"0\r\n\r\n", 10)
    yield (
        "20 chats of a template that loops",
        complete({"messages": [{"role": "user", "content": "loop"}]}, 20, path=chat),
    )
    yield "10,000 requests in one connection", raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)


def watch(process: psutil.Process, port: int, attack: Attack) -> Watch:
    """Ask for /health repeatedly while the attack runs in a separate process, so that it does not slow the requests."""
    seen = Watch(process.memory_info().rss)
    forking = multiprocessing.get_context("fork")
    receiving, sending = forking.Pipe(duplex=False)
    attacker = forking.Process(target=lambda: sending.send(attack(port)))
    attacker.start()
    while attacker.is_alive():
        begin = time.perf_counter()
        seen.failures += not _healthy(port)
        seen.slowest = max(seen.slowest, time.perf_counter() - begin)
        seen.peak = max(seen.peak, process.memory_info().rss)
        attacker.join(0.005)
    seen.answers = receiving.recv()
    return seen


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=120) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def server(folder: Path, threads: int = 1) -> Iterator[tuple[psutil.Popen, int]]:
    """Start a server of the model in ``folder``; yield its process and its port."""
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    options = "--tokenizer", "bytes", "--name", "attacked", "--prefix-cache", "0"
    with serving(folder, *options, threads=threads) as (process, port):
        # The first request of a process loads code.
        complete({"prompt": "abc", "max_tokens": 3})(port)
        yield process, port


def main() -> int:
    given = parsed(parser_of(__doc__, only=("", "only attacks with this in their name")))
    rows, seen = [], list[Watch]()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        gecko.Gecko(gecko.GeckoConfig.preset("tiny")).save(folder)
        with server(Path(folder)) as (process, port):
            start = process.memory_info().rss
            for name, attack in attacks():
                if given.only in name:
                    seen.append(watch(process, port, attack))
                    answers = ", ".join(f"{count} × {answer}" for answer, count in sorted(seen[-1].answers.items()))
                    rows.append((name, answers, seen[-1].slowest, seen[-1].growth / 1e6))
                    print(*rows[-1], sep=" | ", flush=True)
                    settled_numbers(port, 60)
    publish(
        "server_attacks.md", given, "The server under attack",
        "Model: `tiny` with random weights, one thread, no prefix cache, the limits that `gecko serve` has by default. "
        f"The client runs on the same machine and waits {PATIENCE:g} s for its answers.",
        table(["attack", "answers", "slowest `/health`, s|.3f", "memory, + MB|.0f"], rows),
        f"Memory at the start: {start / 1e6:.0f} MB; at most {max(one.peak for one in seen) / 1e6:.0f} MB. "
        f"Bounds: `/health` answers within {LONGEST} s, and an attack adds at most {BOUND / 1e6:.0f} MB. "
        f"Failed calls of `/health`: {sum(one.failures for one in seen)}; "
        f"attacks within all bounds: {sum(one.within_bounds for one in seen)} of {len(seen)}.",
    )  # fmt: skip
    return 0 if all(one.within_bounds for one in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
