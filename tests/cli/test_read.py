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
from hypothesis import example, given
from hypothesis import strategies as st
from support.interrupts import take_interrupts

import gecko
from gecko.cli.arguments import split_at_characters
from gecko.inference import read

# ---- ``gecko read``.

Command = Callable[..., Any]

TEXT = "Some words, naïve café, and more words. 🎉\n".encode() * 300


def newest(run_folder: Path) -> gecko.Gecko:
    return gecko.load(run_folder / "checkpoints" / "step-00000002")


def assert_reads(state: gecko.GeckoState, model: gecko.Gecko, tokens: list[int]) -> None:
    expected = read(model, [torch.tensor(tokens)]).state
    assert (state.position, state.model) == (expected.position, expected.model)
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, expected.tensors()[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_book_is_read_from_its_document_start(command: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(TEXT)
    result = command("read", run_folder, tmp_path / "book.txt", "--out", tmp_path / "new" / "book.state", code=0)
    assert result.stdout == ""
    assert f"read {len(TEXT) + 1:,} tokens ({len(TEXT):,} bytes)" in result.stderr
    assert "loss" not in result.stderr
    assert_reads(gecko.GeckoState.load(tmp_path / "new" / "book.state"), newest(run_folder), [256, *TEXT])


def test_every_kind_of_source_and_several_of_them(command: Command, run_folder: Path, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "one.txt").write_bytes(b"the first")
    (tmp_path / "two.gz").write_bytes(gzip.compress(b"the second"))
    (tmp_path / "three.zst").write_bytes(zstandard.compress(b"the third"))
    books = (tmp_path / "one.txt", tmp_path / "two.gz", "-", tmp_path / "three.zst")
    command("read", run_folder, *books, "-o", tmp_path / "s", input=b"from a pipe", code=0)
    whole = [256, *b"the firstthe secondfrom a pipethe third"]
    assert_reads(gecko.GeckoState.load(tmp_path / "s"), newest(run_folder), whole)


def test_a_state_goes_on_and_two_questions_are_independent(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """A state is copied for each question: neither question affects the other or the file."""
    book = tmp_path / "book.state"
    (tmp_path / "one").write_bytes(TEXT)
    (tmp_path / "two").write_bytes(b"and so on")
    command("read", run_folder, tmp_path / "one", "-o", book)
    before = book.read_bytes()
    ask = ("generate", run_folder, "--state", book, "-n", 12, "--seed", 3, "--temperature", 9, "-p")
    alone = [command(*ask, question).stdout for question in ("Who", "Why not? ")]
    assert [command(*ask, question).stdout for question in ("Why not? ", "Who")] == alone[::-1]
    assert alone[0] != alone[1]
    assert book.read_bytes() == before
    result = command("read", run_folder, tmp_path / "two", "--state", book, "-o", tmp_path / "both.state")
    assert "read 9 tokens" in result.stderr
    assert_reads(gecko.GeckoState.load(tmp_path / "both.state"), newest(run_folder), [256, *TEXT, *b"and so on"])
    assert book.read_bytes() == before


def test_loss_is_that_of_every_byte_after_the_first_token(command: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(TEXT)
    result = command("read", run_folder, tmp_path / "book", "--loss", "-o", tmp_path / "s")
    tokens = torch.tensor([[256, *TEXT]])
    losses, _ = newest(run_folder).token_losses(tokens[:, :-1], tokens[:, 1:])
    told = re.search(r"loss ([\d.]+) nats per token, ([\d.]+) nats per byte", result.stderr)
    assert told is not None, result.stderr
    assert float(told[1]) == pytest.approx(losses.mean().item(), abs=2e-4)
    assert float(told[2]) == pytest.approx(losses.sum().item() / len(TEXT), rel=2e-4)
    assert_reads(gecko.GeckoState.load(tmp_path / "s"), newest(run_folder), [256, *TEXT])
    only = command("read", run_folder, tmp_path / "book", "--loss", code=0)
    assert told[0] in only.stderr


def told_losses(result: Any) -> tuple[str, str]:
    """Return nats per token and nats per byte."""
    told = re.search(r"loss ([\d.]+) nats per token, ([\d.]+) nats per byte", result.stderr)
    assert told is not None, result.stderr
    return told[1], told[2]


def test_for_bytes_the_loss_a_token_is_that_a_byte(command: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes(b"ab")
    a_token, a_byte = told_losses(command("read", run_folder, tmp_path / "two", "--loss", "-o", tmp_path / "s"))
    assert a_token == a_byte
    # The first byte after a state has no loss.
    a_token, a_byte = told_losses(command("read", run_folder, tmp_path / "two", "--loss", "--state", tmp_path / "s"))
    losses, _ = newest(run_folder).token_losses(torch.tensor([[256, *b"aba"]]), torch.tensor([[*b"abab"]]))
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
    losses, _ = newest(run_folder).token_losses(torch.tensor([[0, 1, 1]]), torch.tensor([[1, 1, 2]]))
    assert float(a_token) == pytest.approx(losses.mean().item(), abs=2e-4)
    assert float(a_byte) == pytest.approx(losses.sum().item() / 11, abs=2e-4)


def test_a_compact_state_is_half_the_size_and_goes_on(command: Command, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book").write_bytes(TEXT)
    for name, options in (("wide", ()), ("small", ("--compact",))):
        command("read", run_folder, tmp_path / "book", "-o", tmp_path / name, *options, code=0)
    command("generate", run_folder, "--state", tmp_path / "small", "-p", "a", "-n", 3, code=0)
    wide, small = (gecko.GeckoState.load(tmp_path / name) for name in ("wide", "small"))
    assert [x.dtype for x in small.tensors().values()] == [x.dtype for x in wide.tensors().values()]


def test_ctrl_c_keeps_what_was_read_and_says_how_to_go_on(
    process: Command, run_folder: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """After an interruption at any place, the command that is shown completes the state of the whole text."""
    text, book, out = TEXT * 4, tmp_path / "the book.gz", tmp_path / "s"
    book.write_bytes(gzip.compress(text))
    (tmp_path / "more").write_bytes(b"the end")
    arguments = [sys.executable, "-m", "gecko", "read", run_folder, book, tmp_path / "more", "--out", out]
    reading = subprocess.Popen(
        list(map(str, arguments)), stderr=subprocess.PIPE, env=environment, preexec_fn=take_interrupts
    )
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
    assert_reads(gecko.GeckoState.load(out), newest(run_folder), [256, *text[:read_so_far]])
    python = f"{shlex.quote(sys.executable)} -m gecko read"
    shell = rest[2].replace("gecko read", python)
    subprocess.run(["sh", "-c", shell], check=True, env=environment, timeout=120, capture_output=True)
    assert_reads(gecko.GeckoState.load(out), newest(run_folder), [256, *text, *b"the end"])


def _reads(pid: int, path: Path) -> bool:
    """Return whether the process has the file open."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") == str(path) for name in os.listdir(folder))
    except OSError:
        return False


def stop_after(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop reading after the given number of blocks, as a signal would."""
    from gecko.train.health import StopSignal

    asked = iter(range(100))
    wanted = property(lambda self: "SIGTERM" if next(asked) >= blocks else None, lambda self, value: None)
    monkeypatch.setattr(StopSignal, "requested", wanted, raising=False)


@pytest.mark.parametrize("place", [0, 1])
def test_stopping_before_the_end(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Reading stops after two blocks of one book; the books before it are read whole, the ones after it are named."""
    books = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for book in books:
        book.write_bytes(TEXT)
    stop_after(place * -(-len(TEXT) // 4096) + 2, monkeypatch)
    result = command("read", run_folder, *books, "--out", tmp_path / "s", "--loss", "--tokenizer", "bytes", code=130)
    told = re.search(r"stopped after ([\d,]+) bytes of .*/([abc]).txt; the rest: tail -c \+(\d+) ", result.stderr)
    assert told is not None, result.stderr
    taken = int(told[1].replace(",", ""))
    assert (told[2], int(told[3])) == ("ab"[place], taken + 1)
    assert result.stderr.rstrip().endswith(" ".join(["-", *map(str, books[place + 1 :])]))
    assert "--tokenizer bytes --loss" in result.stderr
    assert TEXT[:taken].decode(), "a whole number of characters"
    assert_reads(gecko.GeckoState.load(tmp_path / "s"), newest(run_folder), [256, *(TEXT * place), *TEXT[:taken]])


def test_the_command_for_the_rest_names_device_and_dtype(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book").write_bytes(TEXT)
    stop_after(2, monkeypatch)
    result = command(
        "read",
        run_folder,
        tmp_path / "book",
        "--out",
        tmp_path / "s",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        code=130,
    )
    assert "--device cpu --dtype float32" in result.stderr


def test_stopped_without_a_state_it_says_where_and_offers_no_command(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the state, the rest of the text would be a new document."""
    (tmp_path / "book").write_bytes(TEXT)
    stop_after(2, monkeypatch)
    result = command("read", run_folder, tmp_path / "book", "--loss", code=130)
    assert re.search(r"stopped after [\d,]+ bytes of .*/book\.$", result.stderr.rstrip()), result.stderr


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
    return folder


def parts(output: str) -> dict[str, list[str]]:
    """Return the rows of the printed table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows if row[0]}


def test_show_says_what_was_read_and_by_whom(command: Command, states: Path) -> None:
    result = command("state", "show", states / "text", code=0)
    state = gecko.GeckoState.load(states / "text")
    lines = {name: " ".join(result.stdout.split()).partition(name)[2] for name in ("weights", "position", "begins at")}
    assert lines["weights"].startswith(f" {state.model}")
    assert lines["position"].startswith(" 1,500 ")
    assert lines["begins at"].startswith(" 0 ")
    assert f"{state.num_bytes:,} bytes in memory, {(states / 'text').stat().st_size:,} in the file" in result.stdout
    assert "SHA-256" in result.stdout


def test_show_counts_every_byte_of_every_part(command: Command, states: Path) -> None:
    state = gecko.GeckoState.load(states / "text")
    table = parts(command("state", "show", states / "text").stdout)
    assert sum(int(row[1].replace(",", "")) for row in table.values() if row[1]) == state.num_bytes
    assert table["CEMA"][2] == "float32"
    assert parts(command("state", "show", states / "compact").stdout)["CEMA"][2] == "bfloat16"


def test_show_measures_what_is_there(command: Command, states: Path) -> None:
    """The log of an empty sum means 0 and does not count as a large number."""
    state = gecko.GeckoState.load(states / "text")
    moving = torch.cat([mixer.cema.flatten() for mixer in state.mixers])
    table = parts(command("state", "show", states / "text").stdout)
    assert float(table["CEMA"][3]) == pytest.approx(moving.square().mean().sqrt().item(), rel=1e-2)
    assert float(parts(command("state", "show", states / "empty").stdout)["working memory"][3]) == 0


def test_several_texts(command: Command, states: Path) -> None:
    assert "1,500, 0" in command("state", "show", states / "two").stdout


def test_diff_of_equal_states(command: Command, states: Path) -> None:
    result = command("state", "diff", states / "text", states / "again", code=0)
    assert result.stdout.splitlines()[-1] == "equal"
    assert {row[0] for row in parts(result.stdout).values()} == {"none"}
    assert "model: the same" in result.stdout


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
    a, b = (gecko.GeckoState.load(states / name) for name in ("text", "compact"))
    expected = torch.stack([x.cema - y.cema for x, y in zip(a.mixers, b.mixers, strict=True)]).norm()
    expected = expected / torch.stack([x.cema for x in a.mixers]).norm()
    table = parts(command("state", "diff", states / "text", states / "compact").stdout)
    assert float(table["CEMA"][0]) == pytest.approx(expected.item(), rel=1e-2)
    assert table["clock"] == table["timestep norms"] == ["none"]


def test_counts_do_not_hide_what_changed_beside_them(command: Command, states: Path, tmp_path: Path) -> None:
    state = gecko.GeckoState.load(states / "text")
    doubled = state.map(lambda x: 2 * x if x.is_floating_point() else x)
    doubled.save(tmp_path / "doubled")
    table = parts(command("state", "diff", states / "text", tmp_path / "doubled").stdout)
    assert table["timestep norms"] == table["CEMA"] == ["1"]
    assert table["clock"] == ["none"]
