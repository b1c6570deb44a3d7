"""What is looked at before a request is accepted: its bytes and its JSON."""

import json
import re
import socket
import time
from contextlib import nullcontext
from typing import Any

import pytest
from serving.conftest import StartServer
from serving.sites import JSON, OK, Site, check_error, head_of, until

from gecko.serving.bodies import MAX_DEPTH, MAX_VALUES, Body, RequestMemory, read_json
from gecko.serving.connection import Hosts
from gecko.serving.limits import ApiError
from gecko.serving.options import Limits

# ---- Requests that are refused before their body is read, and connections that make the server wait.

BODY = json.dumps(OK).encode()
HEALTH = head_of("Connection: close", "/health", "GET")


def test_names_of_other_sites_are_refused(site: Site) -> None:
    """A page may let its own name resolve to this machine."""
    hosts = ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "127.0.0.1@evil.example")
    origins = ("http://evil.example", "null", "http://localhost:1", "file://", "http://[", "http://127.0.0.1.evil")
    for path in ("/", "/health", "/v1/models", "/v1/completions"):
        for host in hosts:
            check_error(site.get(path, headers={"Host": host}), 403, "--allowed-host")
        for origin in origins:
            check_error(site.post(path, json=OK, headers={"Origin": origin}), 403, "--allowed-host")


def test_the_servers_own_names_are_taken(site: Site) -> None:
    port = site.url.rpartition(":")[2]
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.5:80", "[::1]:80", "localhost."):
        assert site.get("/health", headers={"Host": host}).status_code == 200
    for name in ("localhost", "127.0.0.1"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert site.post(json=OK, headers=own).status_code == 200


NAMES: list[tuple[str, tuple[str, ...], str | None, str | None, bool]] = [
    ("0.0.0.0", (), "10.0.0.1:80", None, True),
    ("0.0.0.0", (), "gecko.example", None, False),
    ("0.0.0.0", ("gecko.example",), "Gecko.Example:80", None, True),
    ("10.0.0.1", (), "10.0.0.1", None, True),
    ("10.0.0.1", (), "10.0.0.2", None, False),
    ("gecko.example", (), "gecko.example", "https://gecko.example", True),
    ("127.0.0.1", ("gecko.example",), "127.0.0.1:8000", "https://gecko.example", True),
    ("127.0.0.1", ("gecko.example",), "127.0.0.1:8000", "https://evil.example", False),
    ("127.0.0.1", (), None, None, True),
]


@pytest.mark.parametrize(("bound", "named", "host", "origin", "fits"), NAMES)
def test_which_names_are_the_servers(bound: str, named: Any, host: str | None, origin: str | None, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ApiError):
        Hosts(bound, named).check(host, origin)


def test_two_lengths_of_one_body_are_refused(site: Site) -> None:
    """A proxy may use the other one, and take the rest for the next request."""
    for lengths in ("Content-Length: 5\r\nTransfer-Encoding: chunked", "Content-Length: 5\r\nContent-Length: 6"):
        for path in ("/health", "/v1/completions"):
            told = site.talk(head_of(lengths, path) + b"0\r\n\r\nGET /")
            assert told.startswith(b"HTTP/1.1 400")
            assert told.count(b"HTTP/1.1") == 1


def test_a_header_that_does_not_end_is_waited_for_so_long(shared: StartServer) -> None:
    site = shared(limits=Limits(header_seconds=0.3))
    begin = time.monotonic()
    assert site.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ").startswith(b"HTTP/1.1 408")
    assert site.talk(b"") == b""
    assert site.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET").count(b"HTTP/1.1") == 2
    assert time.monotonic() - begin < 15
    until(lambda: not site.server.server_state.connections)


def test_a_long_header_is_refused(site: Site) -> None:
    """The connection may end while the rest of the header is still being sent."""
    told = site.talk(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 100_000 + b"\r\n")
    assert told[:12] in (b"HTTP/1.1 400", b"")


def test_a_body_that_is_not_needed_is_not_kept(hasty: Site) -> None:
    """Nor waited for: the response is sent before the body arrives, and the connection ends soon after."""
    for path, status in (("/health", 405), ("/nothing", 404), ("/v1/completions", 401)):
        told = hasty.talk(head_of("Content-Length: 10000000", path) + b"a" * 1_000_000)
        assert told.startswith(f"HTTP/1.1 {status}".encode())
    assert hasty.service.memory.taken == 0
    follow = hasty.talk(head_of("Content-Length: 4", "/health") + b"body" + HEALTH)
    assert re.findall(rb"HTTP/1.1 (\d+)", follow) == [b"405", b"200"]


def test_all_bodies_together_are_bounded(start: StartServer) -> None:
    site = start(limits=Limits(body_bytes=1 << 20, memory_bytes=1 << 20))
    with site.connect() as connection:
        connection.sendall(head_of("Content-Length: 900000") + b" " * 800_000)
        until(lambda: site.service.memory.taken == 800_000)
        refused = site.post(json={"prompt": "a" * 500_000})
        check_error(refused, 503, "memory")
        assert refused.headers["retry-after"] == "2"
        assert site.post(json=OK).status_code == 200
    until(lambda: site.service.memory.taken == 0)


def test_memory_of_a_request_is_given_back_once() -> None:
    memory = RequestMemory(100)
    first, second = Body(memory), Body(memory)
    first.add(b"a" * 60)
    with pytest.raises(ApiError, match="other requests"):
        second.add(b"a" * 50)
    with pytest.raises(ApiError, match="at most 100"):
        first.resize(101)
    assert bytes(first.take()) == b"a" * 60
    first.resize(10)
    second.add(b"a" * 90)
    for body in (first, second, first):
        body.close()
    assert memory.taken == 0


def test_odd_methods_addresses_and_bodies(site: Site) -> None:
    check_error(site.post(content=BODY, headers={**JSON, "Content-Encoding": "gzip"}), 415, "compressed")
    for method in ("TRACE", "OPTIONS", "PUT", "DELETE", "PATCH", "NONSENSE"):
        assert site.client.request(method, "/v1/completions").status_code == 405
    for target in ("/%00", "/../../etc/passwd", "/%2e%2e/x", "//health", "/" + "a" * 10_000):
        told = site.talk(head_of("Connection: close", target, "GET"))
        assert told.startswith(b"HTTP/1.1 404") and len(told) < 1000
    upgrade = "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
    assert site.talk(head_of(upgrade, "/health", "GET")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_disconnected(shared: StartServer, stream: bool) -> None:
    """Its memory counts until its response is sent."""
    site = shared(limits=Limits(body_seconds=1))
    body = json.dumps({"prompt": "\0" * 20_000, "n": 40, "echo": True, "max_tokens": 1, "stream": stream}).encode()
    made = site.numbers()["gecko_generated_tokens_total"]
    host, port = site.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect((host, int(port)))
        connection.sendall(head_of(f"Content-Length: {len(body)}") + body)
        until(lambda: site.service.memory.taken > 40 * 20_000 * 8)
        if not stream:
            until(lambda: site.numbers()["gecko_generated_tokens_total"] == made + 40)
            assert site.service.memory.taken > 40 * 20_000 * 8
        until(lambda: not site.server.server_state.connections)
    until(lambda: site.service.memory.taken == 0)


# ---- JSON that is parsed in steps equals that of the standard library, and bounds are enforced.

VALUES: list[Any] = [
    None, True, 5, -1.5e3, "", 'a"\\\n\u00e9\U0001f600\ud800', [], {}, [[]], [{}], {"a": {}},
    [1, 2, "a", 3, [4], None, 5, 6.5],
    list(range(50_000)), [list(range(20_000)), ["x", 1]], {"prompt": [1, 2], "n": 3, "t": [0.5, -1e-7]}, ["a"] * 1000,
    10**400, [10**400, 1],
]  # fmt: skip


def test_it_reads_what_the_library_reads() -> None:
    for spaces in ({"separators": (",", ":")}, {"indent": 3}, {"ensure_ascii": True}):
        for value in VALUES:
            assert read_json(f" {json.dumps(value, **spaces)}\n".encode()) == value


BROKEN = [
    "", " ", "[", "{", "]", "[1", "[1,", "[1,]", "[,1]", "[1,,2]", "[1 2]", "[1}", '{"a"}', '{"a":}', '{"a":1,}',
    "{1:2}", '{"a":1 "b":2}', "1 2", '"a', '"\n"', '"\\x"', "nul", "[nul]", "01", "[01]", "+1", "[+1]", "[1.]", "-",
    "[-]", "[" + "1" * 40_000 + "]", "9" * 5_000, "[" + "1," * 40_000 + "]", "\ufeff\ufeff1",
]  # fmt: skip


def test_what_is_no_json_is_refused() -> None:
    for text in BROKEN:
        with pytest.raises(ValueError, match="at character"):
            read_json(text.encode())
    with pytest.raises(ValueError, match="at byte 1"):
        read_json(b'"\xff"')


def test_bounds() -> None:
    assert len(read_json(json.dumps(["a"] * (MAX_VALUES - 1)).encode())) == MAX_VALUES - 1
    read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    for text, told in (
        (json.dumps(["a"] * MAX_VALUES), "100,000"),
        (json.dumps({str(i): i for i in range(MAX_VALUES // 2 + 1)}), "100,000"),
        ("[[]," * MAX_VALUES, "32 deep"),
        ("[" + "[]," * MAX_VALUES, "100,000"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "32 deep"),
    ):
        with pytest.raises(ValueError, match=told):
            read_json(text.encode())
