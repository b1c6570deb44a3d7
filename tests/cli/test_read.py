"""``gecko read``, and the states that it writes."""

import dataclasses
import gzip
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import NEWEST, Command
from hypothesis import example, given
from hypothesis import strategies as st
from support.interrupts import take_interrupts

import gecko
from gecko.cli.arguments import split_at_characters
from gecko.inference import read
from gecko.train.health import StopSignal

TEXT = "Some words, naïve café, and more words. 🎉\n".encode() * 300


def assert_reads(file: Path, run_folder: Path, text: bytes) -> None:
    """Assert that a file holds the state of the run's newest model after a text."""
    state = gecko.GeckoState.load(file)
    expected = read(gecko.load(run_folder / NEWEST), [torch.tensor([256, *text])]).state
    assert (state.position, state.model) == (expected.position, expected.model)
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, expected.tensors()[name], rtol=1e-4, atol=1e-4, msg=name)


def told_losses(result: Any) -> tuple[str, str]:
    """Return nats per token and nats per byte."""
    told = re.search(r"loss ([\d.]+) nats per token, ([\d.]+) nats per byte", result.stderr)
    assert told is not None, result.stderr
    return told[1], told[2]


def test_every_kind_of_source_and_several_of_them(command: Command, run_folder: Path, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "one.txt").write_bytes(b"the first")
    (tmp_path / "two.gz").write_bytes(gzip.compress(b"the second"))
    (tmp_path / "three.zst").write_bytes(zstandard.compress(b"the third"))
    books = (tmp_path / "one.txt", tmp_path / "two.gz", "-", tmp_path / "three.zst")
    command("read", run_folder, *books, "-o", tmp_path / "s", input=b"from a pipe", code=0)
    assert_reads(tmp_path / "s", run_folder, b"the firstthe secondfrom a pipethe third")


def test_a_state_goes_on_and_two_questions_are_independent(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """A state is copied for each question: neither question affects the other or the file. One rounded goes on too."""
    book = tmp_path / "new" / "book.state"
    (tmp_path / "one").write_bytes(TEXT)
    (tmp_path / "two").write_bytes(b"and so on")
    result = command("read", run_folder, tmp_path / "one", "-o", book, code=0)
    assert result.stdout == "" and "loss" not in result.stderr
    assert f"read {len(TEXT) + 1:,} tokens ({len(TEXT):,} bytes)" in result.stderr
    assert_reads(book, run_folder, TEXT)
    before = book.read_bytes()
    ask = ("generate", run_folder, "-n", 12, "--seed", 3, "--temperature", 9, "--state")
    alone = [command(*ask, book, "-p", question).stdout for question in ("Who", "Why not? ")]
    assert [command(*ask, book, "-p", question).stdout for question in ("Why not? ", "Who")] == alone[::-1]
    assert alone[0] != alone[1]
    result = command("read", run_folder, tmp_path / "two", "--state", book, "-o", tmp_path / "both.state")
    assert "read 9 tokens" in result.stderr
    assert_reads(tmp_path / "both.state", run_folder, TEXT + b"and so on")
    assert book.read_bytes() == before
    small = tmp_path / "small"
    command("read", run_folder, tmp_path / "one", "-o", small, "--compact", code=0)
    command(*ask, small, "-p", "a", code=0)
    dtypes = [[x.dtype for x in gecko.GeckoState.load(path).tensors().values()] for path in (book, small)]
    assert dtypes[0] == dtypes[1] and small.stat().st_size < 0.7 * book.stat().st_size


def test_loss_is_that_of_every_byte_after_the_first_token(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """For bytes, the loss a token is that a byte. The first byte after a state has no loss."""
    model = gecko.load(run_folder / NEWEST)
    (tmp_path / "book").write_bytes(TEXT)
    told = told_losses(command("read", run_folder, tmp_path / "book", "--loss", "-o", tmp_path / "s", code=0))
    tokens = torch.tensor([[256, *TEXT]])
    losses, _ = model.token_losses(tokens[:, :-1], tokens[:, 1:])
    assert float(told[0]) == pytest.approx(losses.mean().item(), abs=2e-4)
    assert float(told[1]) == pytest.approx(losses.sum().item() / len(TEXT), rel=2e-4)
    assert_reads(tmp_path / "s", run_folder, TEXT)
    assert told_losses(command("read", run_folder, tmp_path / "book", "--loss", code=0)) == told
    (tmp_path / "two").write_bytes(b"ab")
    a_token, a_byte = told_losses(command("read", run_folder, tmp_path / "two", "--loss", "-o", tmp_path / "t"))
    assert a_token == a_byte
    a_token, a_byte = told_losses(command("read", run_folder, tmp_path / "two", "--loss", "--state", tmp_path / "t"))
    losses, _ = model.token_losses(torch.tensor([[256, *b"aba"]]), torch.tensor([[*b"abab"]]))
    assert a_token == a_byte and float(a_byte) == pytest.approx(losses[0, -1].item(), abs=2e-4)


def test_the_loss_a_byte_of_longer_tokens(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """Words of two bytes and an unknown word, which stands for its mark: three losses over the 11 of "ab ab <unk>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "ab": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "book").write_bytes(b"ab ab abcd")
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--loss")
    a_token, a_byte = told_losses(command("read", run_folder, tmp_path / "book", *options))
    model = gecko.load(run_folder / NEWEST)
    losses, _ = model.token_losses(torch.tensor([[0, 1, 1]]), torch.tensor([[1, 1, 2]]))
    assert float(a_token) == pytest.approx(losses.mean().item(), abs=2e-4)
    assert float(a_byte) == pytest.approx(losses.sum().item() / 11, abs=2e-4)


def test_ctrl_c_keeps_what_was_read_and_says_how_to_go_on(
    start: Callable[..., Any], run_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """After an interruption at any place, the command that is shown completes the state of the whole text."""
    text, book, out = TEXT * 4, tmp_path / "the book.gz", tmp_path / "s"
    book.write_bytes(gzip.compress(text))
    (tmp_path / "more").write_bytes(b"the end")
    reading = start("read", run_folder, book, tmp_path / "more", "--out", out, preexec_fn=take_interrupts)
    deadline = time.monotonic() + 60
    while not _reads(reading.pid, book) and time.monotonic() < deadline:
        time.sleep(0.02)
    reading.send_signal(signal.SIGINT)
    told = reading.communicate(timeout=60)[1].decode()
    assert reading.returncode == 130, told
    assert "SIGINT: the piece in progress is read, then the state is saved" in told
    rest = re.search(r"stopped after ([\d,]+) bytes of .*; the rest: (.*)", told)
    assert rest is not None, told
    read_so_far = int(rest[1].replace(",", ""))
    assert 0 <= read_so_far < len(text)
    assert_reads(out, run_folder, text[:read_so_far])
    shell = rest[2].replace("gecko read", f"{shlex.quote(sys.executable)} -m gecko read")
    subprocess.run(["sh", "-c", shell], check=True, env=environment, timeout=120, capture_output=True)
    assert_reads(out, run_folder, text + b"the end")


def _reads(pid: int, path: Path) -> bool:
    """Return whether the process has the file open."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") == str(path) for name in os.listdir(folder))
    except OSError:
        return False


@pytest.mark.parametrize("place", [0, 1])
def test_stopping_before_the_end(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Reading stops after two blocks of one book; the books before it are read whole, the ones after it are named.

    The command for the rest has the same options. Without a state the rest would be a new document, so there is none.
    """
    books = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for book in books:
        book.write_bytes(TEXT)

    def stopped(*words: object) -> Any:
        asked = iter(range(100))
        most = place * -(-len(TEXT) // 4096) + 2
        wanted = property(lambda self: "SIGTERM" if next(asked) >= most else None, lambda self, value: None)
        monkeypatch.setattr(StopSignal, "requested", wanted, raising=False)
        return command("read", run_folder, *books, *words, "--loss", code=130)

    options = "--tokenizer bytes --device cpu --dtype float32"
    result = stopped("--out", tmp_path / "s", *options.split())
    told = re.search(r"stopped after ([\d,]+) bytes of .*/([abc]).txt; the rest: tail -c \+(\d+) ", result.stderr)
    assert told is not None, result.stderr
    taken = int(told[1].replace(",", ""))
    assert (told[2], int(told[3])) == ("ab"[place], taken + 1)
    assert result.stderr.rstrip().endswith(" ".join(["-", *map(str, books[place + 1 :])]))
    assert f"{options} --loss" in result.stderr
    assert TEXT[:taken].decode(), "a whole number of characters"
    assert_reads(tmp_path / "s", run_folder, TEXT * place + TEXT[:taken])
    assert re.search(r"stopped after [\d,]+ bytes of .*/[ab]\.txt\.$", stopped().stderr.rstrip())


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 300), max_size=4), size=st.integers(8, 20))
@example("a" * 7 + "🎉" * 5, [], 8)
def test_blocks_end_where_characters_end(text: str, cuts: list[int], size: int) -> None:
    content = text.encode()
    places = sorted(min(cut, len(content)) for cut in cuts)
    pieces = [content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True)]
    blocks = list(split_at_characters(pieces, size))
    assert b"".join(blocks) == content
    assert "".join(block.decode() for block in blocks) == text
    assert all(0 < len(block) <= size for block in blocks)


@given(content=st.binary(max_size=100), size=st.integers(8, 20))
@example(b"\x80" * 60, 8)
def test_blocks_of_what_is_no_text(content: bytes, size: int) -> None:
    blocks = list(split_at_characters(iter(io.BytesIO(content).read1, b""), size))
    assert b"".join(blocks) == content
    assert all(0 < len(block) <= size for block in blocks)


# ---- ``gecko state show`` and ``gecko state diff``.


@pytest.fixture(scope="module")
def states(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of states: one text, and variations that differ from it in one way each."""
    folder = tmp_path_factory.mktemp("states")
    newest, older = (gecko.load(run_folder / "checkpoints" / f"step-0000000{step}") for step in (2, 1))
    tokens = torch.arange(1500) % 251
    state = read(newest, [tokens]).state
    state.save(folder / "text")
    state.save(folder / "again")
    state.save(folder / "compact", compact=True)
    read(newest, [tokens[:-1]]).state.save(folder / "shorter")
    read(older, [tokens]).state.save(folder / "older")
    dataclasses.replace(state, model=older.fingerprint()).save(folder / "relabelled")
    newest.empty_state().save(folder / "empty")
    gecko.GeckoState.stack([state, newest.empty_state()]).save(folder / "two")
    gecko.GeckoState.empty(gecko.GeckoConfig.preset("tiny")).save(folder / "tiny")
    state.map(lambda x: 2 * x if x.is_floating_point() else x).save(folder / "doubled")
    return folder


def parts(result: Any) -> dict[str, list[str]]:
    """Return the rows of the printed table by their first cell."""
    lines = [line.strip("│").split("│") for line in result.stdout.splitlines() if "│" in line]
    return {name: row for name, *row in ([cell.strip() for cell in line] for line in lines) if name}


def test_show_says_what_was_read_by_whom_and_how_large_each_part_is(command: Command, states: Path) -> None:
    result, state = command("state", "show", states / "text", code=0), gecko.GeckoState.load(states / "text")
    lines = {name: " ".join(result.stdout.split()).partition(name)[2] for name in ("weights", "position", "begins at")}
    for name, value in {"weights": state.model, "position": "1,500", "begins at": "0"}.items():
        assert lines[name].startswith(f" {value}")
    assert f"{state.num_bytes:,} bytes in memory, {(states / 'text').stat().st_size:,} in the file" in result.stdout
    assert "SHA-256" in result.stdout
    table = parts(result)
    assert sum(int(row[1].replace(",", "")) for row in table.values() if row[1]) == state.num_bytes
    moving = torch.cat([mixer.cema.flatten() for mixer in state.mixers])
    assert table["CEMA"][2] == "float32"
    assert float(table["CEMA"][3]) == pytest.approx(moving.square().mean().sqrt().item(), rel=1e-2)
    assert parts(command("state", "show", states / "compact"))["CEMA"][2] == "bfloat16"
    # The log of an empty sum means 0 and does not count as a large number.
    assert float(parts(command("state", "show", states / "empty"))["working memory"][3]) == 0
    assert "1,500, 0" in command("state", "show", states / "two").stdout


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("compact", "model: the same"),
        ("shorter", "position: 1,500 and 1,499"),
        ("older", "model: other weights"),
        ("relabelled", "model: other weights"),
        ("tiny", "model: other architectures: num_layers 2 and 4"),
        ("two", "position: 1,500 and 1,500, 0"),
        ("empty", "position: 1,500 and 0"),
    ],
)
def test_diff_says_what_differs(command: Command, states: Path, other: str, message: str) -> None:
    for pair in ((states / "text", states / other), (states / other, states / "text")):
        result = command("state", "diff", *pair, code=1)
        assert result.stdout.splitlines()[-1] == "not equal"
        if pair[0].name == "text":
            assert message in result.stdout


def test_diff_measures_each_part(command: Command, states: Path) -> None:
    """Counts do not hide what changed beside them."""
    result = command("state", "diff", states / "text", states / "again", code=0)
    assert result.stdout.splitlines()[-1] == "equal" and "model: the same" in result.stdout
    assert {row[0] for row in parts(result).values()} == {"none"}
    a, b = (gecko.GeckoState.load(states / name) for name in ("text", "compact"))
    expected = torch.stack([x.cema - y.cema for x, y in zip(a.mixers, b.mixers, strict=True)]).norm()
    expected = expected / torch.stack([x.cema for x in a.mixers]).norm()
    table = parts(command("state", "diff", states / "text", states / "compact"))
    assert float(table["CEMA"][0]) == pytest.approx(expected.item(), rel=1e-2)
    assert table["clock"] == table["timestep norms"] == ["none"]
    table = parts(command("state", "diff", states / "text", states / "doubled"))
    assert table["timestep norms"] == table["CEMA"] == ["1"] and table["clock"] == ["none"]
