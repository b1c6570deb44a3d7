"""``gecko generate`` and ``gecko chat``: texts and conversations."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cli.conftest import NEWEST, Command

import gecko
from gecko.data import load_tokenizer
from gecko.data.chat import PlainChat
from gecko.data.turns import Turn


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
    damaged = shutil.copytree(run_folder, tmp_path / "demo")
    newest, older = damaged / NEWEST, damaged / "checkpoints" / "step-00000001"
    flip_byte(newest / "model.safetensors")
    result = command("generate", damaged, "-n", 5, "--temperature", 0, code=0)
    assert "warning: skipping the checkpoint step-00000002" in result.stderr
    assert result.stdout == command("generate", older, "-n", 5, "--temperature", 0).stdout
    assert "damaged" in command("generate", newest, code=2).stderr
    flip_byte(older / "model.safetensors")
    command("generate", damaged, code=2)


# ---- ``gecko chat``: messages from a pipe, commands, and Ctrl-C.


def spoken(run_folder: Path, *questions: str) -> list[str]:
    model, plain = gecko.load(run_folder), PlainChat(load_tokenizer("bytes"))
    ids, answers = plain.encode([Turn("user", questions[0])]), []
    for place, question in enumerate(questions):
        closing, following = plain.continuation([Turn("user", question)])
        ids += [*closing, *following] if place else []
        out = gecko.generate(model, ids, max_new_tokens=12, temperature=0.0)
        ids += out.tokens[0]
        answers.append(bytes(out.tokens[0]).decode().lstrip())
    return answers


def talk(command: Command, model: Path, *lines: object) -> Any:
    typed = "".join(f"{line}\n" for line in lines).encode()
    return command("chat", model, "--temperature", 0, "-n", 12, input=typed, code=0)


def test_a_conversation_is_saved_reset_and_loaded(command: Command, run_folder: Path, tmp_path: Path) -> None:
    """Each line of a pipe is answered; empty ones are not."""
    state, both = tmp_path / "talk.state", spoken(run_folder, "hello", "and you?")
    result = talk(command, run_folder, "hello", "", "and you?")
    assert result.stdout.splitlines() == both
    assert "stopped after 12 tokens; --max-new-tokens" in result.stderr
    result = talk(command, run_folder, "hello", f"/save {state}", "/reset", f"/load {state}", "and you?", "/quit", "no")
    assert result.stdout.splitlines() == both, result.stderr
    assert f"saved to {state}" in result.stderr
    assert talk(command, run_folder, f"/load {state}", "and you?").stdout.splitlines() == both[1:]


def test_ctrl_c_ends_the_answer_and_not_the_program(start: Callable[..., Any], run_folder: Path) -> None:
    with start("chat", run_folder, "-n", "1000000", "--temperature", "0") as process:
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
