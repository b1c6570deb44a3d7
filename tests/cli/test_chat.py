"""``gecko chat``: messages from a pipe, commands, what it says about the model, and Ctrl-C."""

from __future__ import annotations

import os
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

Command = Callable[..., Any]


def expected(run_folder: Path, *questions: str, tokens: int) -> list[str]:
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
    assert result.stdout.splitlines() == expected(run_folder, "hello", "and you?", tokens=12)
    assert "has no chat template, so it was not tuned for chat" in result.stderr
    assert f"gecko finetune {run_folder} chats.jsonl" in result.stderr
    assert "stopped after 12 tokens; --max-new-tokens" in result.stderr


def test_a_conversation_is_saved_reset_and_loaded(command: Command, run_folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "talk.state"
    result = talk(command, run_folder, "hello", f"/save {state}", "/reset", f"/load {state}", "and you?", "/quit", "no")
    assert result.stdout.splitlines() == expected(run_folder, "hello", "and you?", tokens=12), result.stderr
    assert f"saved to {state}" in result.stderr
    again = talk(command, run_folder, f"/load {state}", "and you?")
    assert again.stdout.splitlines() == expected(run_folder, "hello", "and you?", tokens=12)[1:]


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
    assert result.stdout.splitlines() == expected(run_folder, "hello", tokens=12)


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
