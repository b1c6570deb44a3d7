"""``gecko serve``, and the dtype of the weights that commands load."""

import json
import re
import shutil
import signal
import socket
import subprocess
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

import gecko
from gecko.train.checkpoints import latest_checkpoint

# ---- ``gecko serve``.

Command = Callable[..., Any]


@contextmanager
def serving(folder: Path, environment: dict[str, str], *options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield the process and its address."""
    command = [sys.executable, "-m", "gecko", "serve", str(folder), "--port", "0", *map(str, options)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, process.stderr.read()
        assert process.stdout.readline().startswith("conversations are written by the ")
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def ask(address: str, path: str = "/v1/completions", **asked: Any) -> Any:
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def health(address: str, host: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/health", headers={"Host": host})) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_run_is_served_until_a_signal(run_folder: Path, environment: dict[str, str], ending: int) -> None:
    with serving(run_folder, environment) as (process, address):
        answer = ask(address, prompt="abc", max_tokens=20, temperature=0)
        model = gecko.load(run_folder / "checkpoints" / "step-00000002")
        expected = gecko.generate(model, [256, *b"abc"], max_new_tokens=20, temperature=0).tokens[0]
        assert answer["choices"][0]["text"] == bytes(expected).decode()
        assert answer["model"] == "demo"
        process.send_signal(ending)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "ended\n"
    assert "Traceback" not in err


def test_a_signal_ends_the_server_whatever_a_template_does(
    run_folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    model = shutil.copytree(run_folder / "checkpoints" / "step-00000002", tmp_path / "model")
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loops)
    hello = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hello"}]}
    with serving(model, environment, "--grace", 20) as (process, address), ThreadPoolExecutor(4) as clients:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(address, **hello)
        asked = [clients.submit(ask, address, **hello) for _ in range(4)]
        assert health(address, "127.0.0.1") == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert {type(request.exception()) for request in asked} <= {urllib.error.HTTPError, urllib.error.URLError}
    assert (process.returncode, out) == (0, "ended\n"), err


def test_options_reach_the_server(run_folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ("--name", "mine", "--states", tmp_path, "--max-new-tokens", 5, "--rows", 2, "--prefix-cache", 0)
    with serving(run_folder, environment, *options) as (_, address):
        assert ask(address, prompt="abc", max_tokens=5)["model"] == "mine"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(address, prompt="abc", max_tokens=6)
    options = (
        "--allowed-host",
        "gecko.example",
        "--allowed-host",
        "other.example",
        "--request-memory",
        1,
        "--max-body",
        1,
    )
    with serving(run_folder, environment, *options) as (_, address):
        for host, status in (("gecko.example", 200), ("other.example:80", 200), ("evil.example", 403)):
            assert health(address, host) == status
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            ask(address, prompt="abc", n=20, max_tokens=100, logprobs=20)
        assert "at most 1,048,576 bytes of memory" in json.load(caught.value)["error"]["message"]
    locked = serving(run_folder, environment, "--api-key-file", key)
    with locked as (_, address), pytest.raises(urllib.error.HTTPError, match="401"):
        ask(address, prompt="abc")


def test_a_port_that_is_taken(command: Command, run_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", run_folder, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "Try another --port" in result.stderr


def test_missing_packages_are_named(command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = command("serve", run_folder, code=2)
    assert "pip install 'gecko-lm[serve]'" in result.stderr


# ---- ``--dtype``: the dtype to which weights are converted after loading.

TEXT = b"the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_bytes(TEXT)
    return tmp_path / "book.txt"


@pytest.fixture
def model(run_folder: Path) -> gecko.Gecko:
    folder = latest_checkpoint(run_folder / "checkpoints")
    assert folder is not None
    return gecko.load(folder)


def read(command: Command, model: Path, book: Path, *options: str) -> Path:
    out = book.with_name("-".join(["state", *options]))
    command("read", model, book, "--out", out, *options, code=0)
    return out


def test_a_rounded_model_reads_and_writes(command: Command, run_folder: Path, book: Path, model: gecko.Gecko) -> None:
    state = gecko.GeckoState.load(read(command, run_folder, book, "--dtype", "bfloat16"))
    rounded = model.bfloat16()
    assert state.model == rounded.fingerprint()
    assert state.mixers[0].attention.values.dtype is torch.bfloat16
    assert state.final_norm.mean.dtype is torch.float32
    options = ("--prompt", "abc", "-n", 9, "--temperature", 0, "--dtype", "bfloat16")
    result = command("generate", run_folder, *options, code=0)
    expected = gecko.generate(rounded, [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert result.stdout == bytes(expected).decode()


def test_losses_are_those_of_float32_but_for_rounding(
    command: Command, run_folder: Path, book: Path, tmp_path: Path
) -> None:
    values = {}
    for dtype in ("float32", "bfloat16"):
        options = ("--lengths", "256", "--dtype", dtype, "-o", tmp_path / dtype)
        command("eval", "perplexity", run_folder, book, *options, code=0)
        record = json.loads((tmp_path / dtype).read_text())
        assert record["model"]["dtype"] == dtype
        values[dtype] = [score["value"] for score in record["scores"] if score["value"] < 100]
    assert values["bfloat16"] != values["float32"]
    assert values["bfloat16"] == pytest.approx(values["float32"], rel=0.02)


def test_states_belong_to_weights_as_they_were_rounded(
    command: Command, run_folder: Path, book: Path, model: gecko.Gecko, tmp_path: Path
) -> None:
    model.bfloat16().save(tmp_path / "rounded")
    rounding, wide = ("--dtype", "bfloat16"), ("--dtype", "float32")

    def goes_on(state: Path, model: Path, *options: str) -> bool:
        given = ("--state", state, "--prompt", "a", "-n", 3, "--tokenizer", "bytes")
        result = command("generate", model, *given, *options)
        assert result.exit_code == 0 or "made by other weights" in result.stderr
        return bool(result.exit_code == 0)

    exact, rounded = read(command, run_folder, book), read(command, run_folder, book, *rounding)
    assert goes_on(exact, run_folder, *wide) and goes_on(rounded, run_folder, *rounding)
    assert not goes_on(exact, run_folder, *rounding) and not goes_on(rounded, run_folder)
    for options in ((), rounding, wide):
        assert goes_on(rounded, tmp_path / "rounded", *options)
        assert not goes_on(exact, tmp_path / "rounded", *options)


def test_a_rounded_model_is_served(run_folder: Path, environment: dict[str, str], model: gecko.Gecko) -> None:
    with serving(run_folder, environment, "--dtype", "bfloat16") as (_, address):
        texts = [ask(address, prompt="abc", max_tokens=9, temperature=0)["choices"][0]["text"] for _ in range(2)]
    expected = gecko.generate(model.bfloat16(), [256, *b"abc"], max_new_tokens=9, temperature=0).tokens[0]
    assert texts == [bytes(expected).decode()] * 2
