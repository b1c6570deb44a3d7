"""``gecko generate``."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gecko

Command = Callable[..., Any]


def expected(run_folder: Path, text: bytes, tokens: int, **options: Any) -> str:
    model = gecko.load(run_folder / "checkpoints" / "step-00000002")
    out = gecko.generate(model, [256, *text], max_new_tokens=tokens, **options)
    return bytes(out.tokens[0]).decode()


def test_the_prompt_is_continued_by_the_newest_checkpoint(command: Command, run_folder: Path) -> None:
    result = command("generate", run_folder, "--prompt", "abc", "-n", 20, "--seed", 3, "--temperature", 0.7)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(run_folder, b"abc", 20, seed=3, temperature=0.7)
    assert "read 4 tokens" in result.stderr
    assert "wrote 20 tokens" in result.stderr
    assert "ended by 'length'; seed 3; position 24;" in result.stderr


def test_the_mode_is_set_once_and_not_for_every_token(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, train = [], gecko.Gecko.train
    monkeypatch.setattr(gecko.Gecko, "train", lambda model, mode=True: modes.append(mode) or train(model, mode))
    assert command("generate", run_folder, "--prompt", "abc", "-n", 20).exit_code == 0
    assert modes == [False]


def test_every_source_of_a_prompt_gives_the_same(command: Command, run_folder: Path, tmp_path: Path) -> None:
    text = b"some words and more words " * 20
    (tmp_path / "plain").write_bytes(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text))
    options = ("-n", 15, "--seed", 3)
    whole = expected(run_folder, text, 15, seed=3, temperature=0.8)
    assert command("generate", run_folder, *options, "--prompt", text.decode()).stdout == whole
    assert command("generate", run_folder, *options, "--file", tmp_path / "plain").stdout == whole
    assert command("generate", run_folder, *options, "--file", tmp_path / "packed.gz").stdout == whole
    assert command("generate", run_folder, "-", *options, input=text).stdout == whole
    assert command("generate", run_folder, "--file", "-", *options, input=text).stdout == whole


def test_standard_input_of_a_process(process: Command, run_folder: Path) -> None:
    text = bytes(range(256)) * 500
    result = process("generate", run_folder, "-", "-n", 5, "--temperature", 0, input=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == expected(run_folder, text, 5, temperature=0)


def test_a_saved_state_goes_on_as_if_never_interrupted(command: Command, run_folder: Path, tmp_path: Path) -> None:
    state, greedy = tmp_path / "text.state", ("--temperature", 0)
    first = command("generate", run_folder, "-p", "abc", "-n", 9, *greedy, "--save-state", state)
    second = command("generate", run_folder, "-p", "xyz", "-n", 9, *greedy, "--state", state, "--save-state", state)
    assert second.exit_code == 0, second.stderr
    assert second.stdout == expected(run_folder, b"abc" + first.stdout.encode() + b"xyz", 9, temperature=0)
    assert gecko.GeckoState.load(state).position == [1 + 3 + 9 + 3 + 9]
    assert "position 25" in second.stderr
    assert "read 3 tokens" in second.stderr


def test_a_stop_string_ends_the_text_and_is_not_printed(command: Command, run_folder: Path) -> None:
    options = ("generate", run_folder, "-p", "abc", "-n", 40, "--seed", 3)
    whole = command(*options).stdout
    result = command(*options, "--stop", whole[20:23], "--stop", "@@")
    assert result.stdout == whole.partition(whole[20:23])[0]
    assert f"ended by {whole[20:23]!r}" in result.stderr


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_found_and_an_older_checkpoint_taken(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "demo"
    shutil.copytree(run_folder, damaged)
    newest, older = (damaged / "checkpoints" / f"step-0000000{n}" for n in (2, 1))
    flip_byte(newest / "model.safetensors")
    result = command("generate", damaged, "-n", 5, "--temperature", 0)
    assert result.exit_code == 0, result.stderr
    assert "warning: skipping the checkpoint step-00000002" in result.stderr
    assert result.stdout == command("generate", older, "-n", 5, "--temperature", 0).stdout
    direct = command("generate", newest)
    assert direct.exit_code == 2
    assert "damaged" in direct.stderr
    flip_byte(older / "model.safetensors")
    assert command("generate", damaged).exit_code == 2


def test_a_wrong_stop_string_is_found_before_the_text_is_read(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gecko.Gecko, "hidden", lambda *_, **__: pytest.fail("the prompt was read"))
    result = command("generate", run_folder, "--prompt", "abc", "--stop", "")
    assert result.exit_code == 2, result.exception
    assert "stop string" in result.stderr


def test_where_the_state_goes_is_looked_at_before_the_text_is_read(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gecko.Gecko, "hidden", lambda *_, **__: pytest.fail("the prompt was read"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        result = command("generate", run_folder, "--prompt", "abc", "--save-state", path)
        assert result.exit_code == 2, result.exception
        assert "--save-state must be a file" in result.stderr and str(path) in result.stderr


def test_a_tilde_is_the_home_folder(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book").write_bytes(b"abc")
    result = command("generate", run_folder, "-p", "abc", "-n", 0, "--save-state", "~/s")
    assert result.exit_code == 0 and (tmp_path / "s").is_file(), result.stderr
    assert command("generate", run_folder, "-p", "abc", "-n", 0, "--state", "~/s").exit_code == 0
    result = command("read", run_folder, "~/book", "--state", "~/s", "--out", "~/both")
    assert result.exit_code == 0 and (tmp_path / "both").is_file(), result.stderr
    assert not (tmp_path / "~").exists()


def test_a_text_tokenizer_refuses_bytes_with_their_place(command: Command, run_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "picture").write_bytes(b"a" * 70_000 + b"\xff\xd8")
    options = ("generate", run_folder, "--tokenizer", tmp_path / "tokenizer.json", "-n", 1)
    result = command(*options, "--file", tmp_path / "picture")
    assert result.exit_code == 2
    assert "byte offset 70000" in result.stderr
    assert "picture" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without")
def test_a_device_that_is_not_there(command: Command, run_folder: Path) -> None:
    result = command("generate", run_folder, "--device", "cuda")
    assert result.exit_code == 2
    assert "device" in result.stderr
