"""What is looked at before a request is accepted: its bytes and its JSON."""

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving.conftest import StartServer
from serving.sites import OK, Site, check_error
from serving.waiting import until

from gecko.serving.bodies import MAX_DEPTH, MAX_VALUES, Body, RequestMemory, read_json
from gecko.serving.connection import Hosts
from gecko.serving.limits import ApiError
from gecko.serving.options import Limits

# ---- Requests that are refused before their body is read, and connections that make the server wait.

BODY = json.dumps(OK).encode()


def talk(site: Site, message: bytes) -> bytes:
    """Return what the server sends until it closes the connection."""
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(message)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/completions"])
def test_names_of_other_sites_are_refused(site: Site, path: str) -> None:
    """A page may let its own name resolve to this machine."""
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "127.0.0.1@evil.example"):
        check_error(httpx2.get(site.url + path, headers={"Host": host}), 403, "--allowed-host")
    for origin in ("http://evil.example", "null", "http://localhost:1", "file://", "http://[", "http://127.0.0.1.evil"):
        check_error(site.post(path, json=OK, headers={"Origin": origin}), 403, "--allowed-host")


def test_the_servers_own_names_are_taken(site: Site) -> None:
    port = site.url.rpartition(":")[2]
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.5:80", "[::1]:80", "localhost."):
        assert httpx2.get(f"{site.url}/health", headers={"Host": host}).status_code == 200
    for name in ("localhost", "127.0.0.1"):
        own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert site.post(json=OK, headers=own).status_code == 200


@pytest.mark.parametrize(
    ("bound", "named", "host", "origin", "fits"),
    [
        ("0.0.0.0", (), "10.0.0.1:80", None, True),
        ("0.0.0.0", (), "gecko.example", None, False),
        ("0.0.0.0", ("gecko.example",), "Gecko.Example:80", None, True),
        ("10.0.0.1", (), "10.0.0.1", None, True),
        ("10.0.0.1", (), "10.0.0.2", None, False),
        ("gecko.example", (), "gecko.example", "https://gecko.example", True),
        ("127.0.0.1", ("gecko.example",), "127.0.0.1:8000", "https://gecko.example", True),
        ("127.0.0.1", ("gecko.example",), "127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1", (), None, None, True),
    ],
)
def test_which_names_are_the_servers(
    bound: str, named: tuple[str, ...], host: str | None, origin: str | None, fits: bool
) -> None:
    hosts = Hosts(bound, named)
    if fits:
        hosts.check(host, origin)
    else:
        with pytest.raises(ApiError):
            hosts.check(host, origin)


def test_two_lengths_of_one_body_are_refused(site: Site) -> None:
    """A proxy may use the other one, and take the rest for the next request."""
    chunked = b"Transfer-Encoding: chunked\r\n"
    for lengths in (b"Content-Length: 5\r\n" + chunked, b"Content-Length: 5\r\nContent-Length: 6\r\n"):
        for path in (b"/health", b"/v1/completions"):
            told = talk(site, b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + lengths + b"\r\n0\r\n\r\nGET /")
            assert told.startswith(b"HTTP/1.1 400")
            assert told.count(b"HTTP/1.1") == 1


def test_the_scheme_of_the_key_has_no_case(start: StartServer) -> None:
    site = start(api_key="secret")
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert site.post(json=OK, headers={"Authorization": f"{scheme} secret"}).status_code == 200
    check_error(site.post(json=OK, headers={"Authorization": "Bearer Secret"}), 401, "API key")


def test_a_header_that_does_not_end_is_waited_for_so_long(start: StartServer) -> None:
    site = start(limits=Limits(header_seconds=0.3))
    begin = time.monotonic()
    assert talk(site, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ").startswith(b"HTTP/1.1 408")
    assert talk(site, b"") == b""
    assert talk(site, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET").count(b"HTTP/1.1") == 2
    assert time.monotonic() - begin < 15
    assert not site.server.server_state.connections


def test_a_long_header_is_refused(site: Site) -> None:
    try:
        told = talk(site, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 100_000 + b"\r\n")
    except ConnectionResetError:
        # The connection ended while the rest of the header was still being sent.
        return
    assert told[:12] in (b"HTTP/1.1 400", b"")


def test_a_body_that_is_not_needed_is_not_kept(start: StartServer) -> None:
    """Nor waited for: the response is sent before the body arrives, and the connection ends soon after."""
    site = start(limits=Limits(body_seconds=0.3), api_key="secret")
    for path, status in (("/health", 405), ("/nothing", 404), ("/v1/completions", 401)):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n".encode()
        assert talk(site, head + b"a" * 1_000_000).startswith(f"HTTP/1.1 {status}".encode())
    assert site.service.memory.taken == 0
    first = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"
    follow = talk(site, first + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+)", follow) == [b"405", b"200"]


def test_all_bodies_together_are_bounded(start: StartServer) -> None:
    site = start(limits=Limits(body_bytes=1 << 20, memory_bytes=1 << 20))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n"
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + b" " * 800_000)
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


def test_compressed_bodies_are_refused(site: Site) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    check_error(site.post(content=BODY, headers=headers), 415, "compressed")


def test_odd_methods_and_addresses(site: Site) -> None:
    for method in ("TRACE", "OPTIONS", "PUT", "DELETE", "PATCH", "NONSENSE"):
        assert httpx2.request(method, f"{site.url}/v1/completions").status_code == 405
    for target in (b"/%00", b"/../../etc/passwd", b"/%2e%2e/x", b"//health", b"/" + b"a" * 10_000):
        told = talk(site, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 404") and len(told) < 1000
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    told = talk(site, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
    assert told.startswith(b"HTTP/1.1 200")


def test_models_lists_states_that_answer(start: StartServer, tmp_path: Path) -> None:
    (tmp_path / "folder.state").mkdir()
    (tmp_path / "dangling.state").symlink_to(tmp_path / "gone")
    site = start(states=tmp_path)
    assert httpx2.get(f"{site.url}/v1/models").json()["data"][0]["states"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_disconnected(start: StartServer, stream: bool) -> None:
    """Its memory counts until its response is sent."""
    site = start(limits=Limits(body_seconds=2))
    asked = {"prompt": "\0" * 20_000, "n": 40, "echo": True, "max_tokens": 1, "stream": stream}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    host, port = site.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: site.service.memory.taken > 40 * 20_000 * 8)
        if not stream:
            until(lambda: site.numbers()["gecko_generated_tokens_total"] == 40)
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


@pytest.mark.parametrize("spaces", [{"separators": (",", ":")}, {"indent": 3}, {"ensure_ascii": True}], ids=range(3))
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_it_reads_what_the_library_reads(value: Any, spaces: dict[str, Any]) -> None:
    assert read_json(f" {json.dumps(value, **spaces)}\n".encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "[", "{", "]", "[1", "[1,", "[1,]", "[,1]", "[1,,2]", "[1 2]", "[1}", '{"a"}', '{"a":}', '{"a":1,}',
        "{1:2}",
        '{"a":1 "b":2}', "1 2", '"a', '"\n"', '"\\x"', "nul", "[nul]", "01", "[01]", "+1", "[+1]", "[1.]", "-", "[-]",
        "[" + "1" * 40_000 + "]", "9" * 5_000, "[" + "1," * 40_000 + "]", "\ufeff\ufeff1",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at character"):
        read_json(text.encode())


def test_invalid_utf8_is_refused() -> None:
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
