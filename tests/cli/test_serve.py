"""``gecko serve``, and the dtype of the weights that commands load."""

import json
import re
import shutil
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import NEWEST, Command, greedy

import gecko

KEY = {"Authorization": "Bearer secret"}


@contextmanager
def serving(start: Callable[..., Any], folder: Path, *options: object) -> Iterator[tuple[Any, str]]:
    """Start a server; yield the process and its address."""
    process = start("serve", folder, "--port", "0", *options, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, process.stderr.read()
        assert process.stdout.readline().startswith("conversations are written by the ")
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def ask(address: str, path: str = "/v1/completions", headers: dict[str, str] = KEY, **asked: Any) -> Any:
    given = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{address}{path}", json.dumps(asked).encode(), given)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def health(address: str, host: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/health", headers={"Host": host})) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def assert_ends(process: Any, number: signal.Signals) -> None:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n"), err
    assert "Traceback" not in err


def test_a_run_is_served_until_a_signal_whatever_a_template_does(
    start: Callable[..., Any], run_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(run_folder / NEWEST, tmp_path / "model")
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loops)
    hello = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hello"}]}
    with serving(start, model, "--grace", 20) as (process, address), ThreadPoolExecutor(4) as clients:
        answer = ask(address, prompt="abc", max_tokens=20, temperature=0)
        assert (answer["choices"][0]["text"], answer["model"]) == (greedy(model, b"abc", 20), "model")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(address, **hello)
        asked = [clients.submit(ask, address, **hello) for _ in range(4)]
        assert health(address, "127.0.0.1") == 200
        assert_ends(process, signal.SIGTERM)
        assert {type(request.exception()) for request in asked} <= {urllib.error.HTTPError, urllib.error.URLError}


def test_options_reach_the_server(start: Callable[..., Any], run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    options = (
        "--name", "mine", "--states", tmp_path, "--max-new-tokens", 100, "--rows", 2, "--prefix-cache", 0,
        "--allowed-host", "gecko.example", "--allowed-host", "other.example", "--request-memory", 1, "--max-body", 1,
        "--api-key-file", tmp_path / "key", "--dtype", "bfloat16",
    )  # fmt: skip
    with serving(start, run_folder, *options) as (process, address):
        for host, status in (("gecko.example", 200), ("other.example:80", 200), ("evil.example", 403)):
            assert health(address, host) == status
        answers = [ask(address, prompt="abc", max_tokens=9, temperature=0) for _ in range(2)]
        expected = greedy(gecko.load(run_folder).bfloat16(), b"abc", 9)
        assert {(answer["model"], answer["choices"][0]["text"]) for answer in answers} == {("mine", expected)}
        for wrong, code in (({"max_tokens": 101}, "400"), ({"headers": {}}, "401")):
            with pytest.raises(urllib.error.HTTPError, match=code):
                ask(address, prompt="abc", **wrong)
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            ask(address, prompt="abc", n=20, max_tokens=100, logprobs=20)
        assert "at most 1,048,576 bytes of memory" in json.load(caught.value)["error"]["message"]
        assert_ends(process, signal.SIGINT)


def test_a_port_that_is_taken_and_packages_that_are_missing_are_named(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", run_folder, "--port", taken.getsockname()[1], code=2)
    assert "Try another --port" in result.stderr
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'gecko-lm[serve]'" in command("serve", run_folder, code=2).stderr


# ---- ``--dtype``: the dtype to which weights are converted after loading.


def read(command: Command, model: Path, folder: Path, *options: str) -> Path:
    (folder / "book.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    out = folder / "-".join(["state", *options])
    command("read", model, folder / "book.txt", "--out", out, *options, code=0)
    return out


def test_a_rounded_model_reads_writes_and_is_evaluated(command: Command, run_folder: Path, tmp_path: Path) -> None:
    rounded, values = gecko.load(run_folder).bfloat16(), {}
    state = gecko.GeckoState.load(read(command, run_folder, tmp_path, "--dtype", "bfloat16"))
    assert state.model == rounded.fingerprint()
    assert state.mixers[0].attention.values.dtype is torch.bfloat16
    assert state.final_norm.mean.dtype is torch.float32
    options = ("--prompt", "abc", "-n", 9, "--temperature", 0, "--dtype", "bfloat16")
    assert command("generate", run_folder, *options, code=0).stdout == greedy(rounded, b"abc", 9)
    for dtype in ("float32", "bfloat16"):
        options = ("--lengths", "256", "--dtype", dtype, "-o", tmp_path / dtype)
        command("eval", "perplexity", run_folder, tmp_path / "book.txt", *options, code=0)
        record = json.loads((tmp_path / dtype).read_text())
        assert record["model"]["dtype"] == dtype
        values[dtype] = [score["value"] for score in record["scores"] if score["value"] < 100]
    assert values["bfloat16"] != values["float32"] == pytest.approx(values["bfloat16"], rel=0.02)


def test_states_belong_to_weights_as_they_were_rounded(command: Command, run_folder: Path, tmp_path: Path) -> None:
    gecko.load(run_folder).bfloat16().save(tmp_path / "rounded")
    rounding, wide = ("--dtype", "bfloat16"), ("--dtype", "float32")

    def goes_on(state: Path, model: Path, *options: str) -> bool:
        given = ("--state", state, "--prompt", "a", "-n", 3, "--tokenizer", "bytes")
        result = command("generate", model, *given, *options)
        assert result.exit_code == 0 or "made by other weights" in result.stderr
        return bool(result.exit_code == 0)

    exact, rounded = read(command, run_folder, tmp_path), read(command, run_folder, tmp_path, *rounding)
    assert goes_on(exact, run_folder, *wide) and goes_on(rounded, run_folder, *rounding)
    assert not goes_on(exact, run_folder, *rounding) and not goes_on(rounded, run_folder)
    for options in ((), rounding, wide):
        assert goes_on(rounded, tmp_path / "rounded", *options)
        assert not goes_on(exact, tmp_path / "rounded", *options)
