"""``gecko generate`` and ``gecko chat``: texts and conversations."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import gecko
from gecko.data import load_tokenizer
from gecko.data.chat import DEFAULT_TEMPLATE, PlainChat
from gecko.data.turns import Turn

# ---- ``gecko generate``.

Command = Callable[..., Any]


def expected(run_folder: Path, text: bytes, tokens: int, **options: Any) -> str:
    model = gecko.load(run_folder / "checkpoints" / "step-00000002")
    out = gecko.generate(model, [256, *text], max_new_tokens=tokens, **options)
    return bytes(out.tokens[0]).decode()


def test_the_mode_is_set_once_and_not_for_every_token(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, train = [], gecko.Gecko.train
    monkeypatch.setattr(gecko.Gecko, "train", lambda model, mode=True: modes.append(mode) or train(model, mode))
    command("generate", run_folder, "--prompt", "abc", "-n", 20, code=0)
    assert modes == [False]


def test_standard_input_of_a_process(process: Command, run_folder: Path) -> None:
    text = bytes(range(256)) * 500
    result = process("generate", run_folder, "-", "-n", 5, "--temperature", 0, input=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == expected(run_folder, text, 5, temperature=0)


def test_a_saved_state_goes_on_as_if_never_interrupted(command: Command, run_folder: Path, tmp_path: Path) -> None:
    state, greedy = tmp_path / "text.state", ("--temperature", 0)
    first = command("generate", run_folder, "-p", "abc", "-n", 9, *greedy, "--save-state", state)
    second = command(
        "generate", run_folder, "-p", "xyz", "-n", 9, *greedy, "--state", state, "--save-state", state, code=0
    )
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
    result = command("generate", damaged, "-n", 5, "--temperature", 0, code=0)
    assert "warning: skipping the checkpoint step-00000002" in result.stderr
    assert result.stdout == command("generate", older, "-n", 5, "--temperature", 0).stdout
    direct = command("generate", newest, code=2)
    assert "damaged" in direct.stderr
    flip_byte(older / "model.safetensors")
    command("generate", damaged, code=2)


def test_a_wrong_stop_string_is_found_before_the_text_is_read(
    command: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gecko.Gecko, "hidden", lambda *_, **__: pytest.fail("the prompt was read"))
    result = command("generate", run_folder, "--prompt", "abc", "--stop", "", code=2)
    assert "stop string" in result.stderr


def test_where_the_state_goes_is_looked_at_before_the_text_is_read(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gecko.Gecko, "hidden", lambda *_, **__: pytest.fail("the prompt was read"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        result = command("generate", run_folder, "--prompt", "abc", "--save-state", path, code=2)
        assert "--save-state must be a file" in result.stderr and str(path) in result.stderr


def test_a_tilde_is_the_home_folder(
    command: Command, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book").write_bytes(b"abc")
    result = command("generate", run_folder, "-p", "abc", "-n", 0, "--save-state", "~/s", code=0)
    assert (tmp_path / "s").is_file(), result.stderr
    command("generate", run_folder, "-p", "abc", "-n", 0, "--state", "~/s", code=0)
    result = command("read", run_folder, "~/book", "--state", "~/s", "--out", "~/both", code=0)
    assert (tmp_path / "both").is_file(), result.stderr
    assert not (tmp_path / "~").exists()


def test_a_text_tokenizer_refuses_bytes_with_their_place(command: Command, run_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "picture").write_bytes(b"a" * 70_000 + b"\xff\xd8")
    options = ("generate", run_folder, "--tokenizer", tmp_path / "tokenizer.json", "-n", 1)
    result = command(*options, "--file", tmp_path / "picture", code=2)
    assert "byte offset 70000" in result.stderr
    assert "picture" in result.stderr


# ---- ``gecko chat``: messages from a pipe, commands, what it says about the model, and Ctrl-C.


def spoken(run_folder: Path, *questions: str, tokens: int) -> list[str]:
    model = gecko.load(run_folder)
    tokenizer = load_tokenizer("bytes")
    plain = PlainChat(tokenizer)
    ids, answers = plain.encode([Turn("user", questions[0])]), []
    for place, question in enumerate(questions):
        closing, following = plain.continuation([Turn("user", question)])
        ids += [*closing, *following] if place else []
        out = gecko.generate(model, ids, max_new_tokens=tokens, temperature=0.0)
        ids += out.tokens[0]
        answers.append(bytes(out.tokens[0]).decode().lstrip())
    return answers


def talk(command: Command, model: Path, *lines: object, options: tuple[object, ...] = ()) -> Any:
    typed = "".join(f"{line}\n" for line in lines).encode()
    return command("chat", model, "--temperature", 0, "-n", 12, *options, input=typed)


def test_each_line_of_a_pipe_is_answered(command: Command, run_folder: Path) -> None:
    result = talk(command, run_folder, "hello", "", "and you?")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == spoken(run_folder, "hello", "and you?", tokens=12)
    assert "has no chat template, so it was not tuned for chat" in result.stderr
    assert f"gecko finetune {run_folder} chats.jsonl" in result.stderr
    assert "stopped after 12 tokens; --max-new-tokens" in result.stderr


def test_a_conversation_is_saved_reset_and_loaded(command: Command, run_folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    result = talk(command, run_folder, "hello", f"/save {state}", "/reset", f"/load {state}", "and you?", "/quit", "no")
    assert result.stdout.splitlines() == spoken(run_folder, "hello", "and you?", tokens=12), result.stderr
    assert f"saved to {state}" in result.stderr
    again = talk(command, run_folder, f"/load {state}", "and you?")
    assert again.stdout.splitlines() == spoken(run_folder, "hello", "and you?", tokens=12)[1:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "error: a command must be one of /save, /load, /reset, /help and /quit; got /nothing"),
        ("/save", "error: /save must name a file, for example /save talk.state"),
        ("/save here.state", "error: a conversation must have an answer to be saved"),
        ("/load nowhere.state", "nowhere.state must be a file written by gecko"),
    ],
)
def test_a_wrong_command_does_not_end_the_program(
    command: Command, run_folder: Path, line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = talk(command, run_folder, line, "hello")
    assert message in result.stderr
    assert result.stdout.splitlines() == spoken(run_folder, "hello", tokens=12)


def test_a_template_beside_the_model_is_used(command: Command, tmp_path: Path) -> None:
    from cli.conftest import CONFIG

    torch.manual_seed(0)
    gecko.Gecko(CONFIG).save(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    result = talk(command, tmp_path / "model", "hello", options=("--tokenizer", "bytes"))
    assert result.exit_code == 0, result.stderr
    assert "conversations are written by the template in" in result.stderr
    assert "not tuned" not in result.stderr


def test_ctrl_c_ends_the_answer_and_not_the_program(run_folder: Path, environment: dict[str, str]) -> None:
    arguments = ["chat", str(run_folder), "-n", "1000000", "--temperature", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "gecko", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for _ in range(2):
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            assert process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            while b"the conversation continues" not in process.stderr.readline():
                assert process.poll() is None
            _discard_written(process.stdout)  # the next read must return when the next answer begins, not earlier
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def _discard_written(pipe: IO[bytes]) -> None:
    os.set_blocking(pipe.fileno(), False)
    while pipe.read(65536):
        pass
    os.set_blocking(pipe.fileno(), True)
