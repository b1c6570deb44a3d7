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


def test_every_way_of_choosing_is_offered(command: Command, run_folder: Path) -> None:
    options = {"top_k": 90, "top_p": 0.99, "min_p": 0.001, "repetition_penalty": 1.4}
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    result = command("generate", run_folder, "--prompt", "abc", "-n", 20, "--seed", 3, "--temperature", 1.5, *given)
    assert result.stdout == expected(run_folder, b"abc", 20, seed=3, temperature=1.5, **options)


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


def test_without_a_prompt_a_document_starts(command: Command, run_folder: Path) -> None:
    result = command("generate", run_folder, "-n", 8, "--temperature", 0)
    assert result.stdout == expected(run_folder, b"", 8, temperature=0)


def test_a_saved_state_goes_on_as_if_never_interrupted(command: Command, run_folder: Path, tmp_path: Path) -> None:
    state, greedy = tmp_path / "text.state", ("--temperature", 0)
    first = command("generate", run_folder, "-p", "abc", "-n", 9, *greedy, "--save-state", state)
    second = command("generate", run_folder, "-p", "xyz", "-n", 9, *greedy, "--state", state, "--save-state", state)
    assert second.exit_code == 0, second.stderr
    assert second.stdout == expected(run_folder, b"abc" + first.stdout.encode() + b"xyz", 9, temperature=0)
    assert gecko.GeckoState.load(state).position == [1 + 3 + 9 + 3 + 9]
    assert "position 25" in second.stderr
    assert "read 3 tokens" in second.stderr


def test_reading_only(command: Command, run_folder: Path, tmp_path: Path) -> None:
    result = command("generate", run_folder, "-p", "abc", "-n", 0, "--save-state", tmp_path / "s")
    assert result.stdout == ""
    assert gecko.GeckoState.load(tmp_path / "s").position == [4]


def test_a_stop_string_ends_the_text_and_is_not_printed(command: Command, run_folder: Path) -> None:
    options = ("generate", run_folder, "-p", "abc", "-n", 40, "--seed", 3)
    whole = command(*options).stdout
    result = command(*options, "--stop", whole[20:23], "--stop", "@@")
    assert result.stdout == whole.partition(whole[20:23])[0]
    assert f"ended by {whole[20:23]!r}" in result.stderr


def test_the_state_needs_a_prompt(command: Command, run_folder: Path, tmp_path: Path) -> None:
    command("generate", run_folder, "-n", 0, "--save-state", tmp_path / "s")
    for prompt in ((), ("--prompt", "")):
        result = command("generate", run_folder, "--state", tmp_path / "s", *prompt)
        assert result.exit_code == 2
        assert "prompt" in result.stderr
        assert result.stdout == ""


def test_two_prompts_are_refused(command: Command, run_folder: Path) -> None:
    for arguments in (("-", "-p", "a"), ("-p", "a", "-f", "b"), ("text",)):
        result = command("generate", run_folder, *arguments)
        assert result.exit_code == 2
        assert "one of --prompt TEXT, --file F and -" in result.stderr


def test_a_missing_file_is_named(command: Command, run_folder: Path, tmp_path: Path) -> None:
    for option in ("--file", "--state"):
        result = command(
            "generate", run_folder, option, tmp_path / "gone", *(("-p", "a") if option == "--state" else ())
        )
        assert result.exit_code == 2
        assert "gone" in result.stderr


def test_a_folder_without_a_model(command: Command, run_folder: Path, tmp_path: Path) -> None:
    result = command("generate", run_folder.parent)
    assert result.exit_code == 2
    assert f"{run_folder.parent} holds demo" in result.stderr
    assert "Did you mean" in command("generate", run_folder.with_name("dem")).stderr
    assert "gecko train" in command("generate", "tiny").stderr


def test_a_run_without_checkpoints(command: Command, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    result = command("generate", tmp_path)
    assert result.exit_code == 2
    assert "must be a folder that holds a model" in result.stderr


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


def test_a_state_of_another_model_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    older = run_folder / "checkpoints" / "step-00000001"
    command("generate", older, "-n", 0, "--save-state", tmp_path / "older")
    result = command("generate", run_folder, "--state", tmp_path / "older", "-p", "a")
    assert result.exit_code == 2
    assert "other weights" in result.stderr
    gecko.Gecko(gecko.GeckoConfig.preset("tiny")).empty_state().save(tmp_path / "tiny")
    result = command("generate", run_folder, "--state", tmp_path / "tiny", "-p", "a")
    assert result.exit_code == 2
    assert "config" in result.stderr


def test_a_damaged_state_is_refused(command: Command, run_folder: Path, tmp_path: Path) -> None:
    command("generate", run_folder, "-n", 0, "--save-state", tmp_path / "s")
    flip_byte(tmp_path / "s")
    result = command("generate", run_folder, "--state", tmp_path / "s", "-p", "a")
    assert result.exit_code == 2
    assert "damaged" in result.stderr


def test_the_tokenizer_must_fit_and_be_known(command: Command, run_folder: Path, tmp_path: Path) -> None:
    small = gecko.GeckoConfig(
        vocab_size=100, num_layers=1, model_dim=8, key_dim=8, value_dim=8, num_heads=1, ffn_dim=8,
        cema_modes=2, chunk_size=4, timestep_groups=2,
    )  # fmt: skip
    gecko.Gecko(small).save(tmp_path)
    result = command("generate", tmp_path)
    assert result.exit_code == 2
    assert "--tokenizer bytes" in result.stderr
    result = command("generate", tmp_path, "--tokenizer", "bytes")
    assert result.exit_code == 2
    assert "vocab_size=100" in result.stderr
    assert "257 ids" in result.stderr
    result = command("generate", run_folder, "--tokenizer", tmp_path / "gone" / "tokenizer.json")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_numbers_out_of_range(command: Command, run_folder: Path) -> None:
    for option, value in (
        ("--temperature", -1),
        ("--top-k", 0),
        ("--top-p", 0),
        ("--min-p", 2),
        ("-n", -1),
        ("--stop", ""),
    ):
        result = command("generate", run_folder, option, value)
        assert result.exit_code == 2, option
        assert result.stdout == ""


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
