"""``gecko chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gecko.cli.command import STATE, WritesText, echo, output_file
from gecko.cli.generate import write_piece
from gecko.records import option

if TYPE_CHECKING:
    from gecko.inference.chat import Answer, Conversation

_say = partial(echo, err=True)
_HELP = """\
/save FILE  save the conversation as a reading state
/load FILE  continue a saved conversation
/reset      forget the conversation
/help       show these commands
/quit       end, as Ctrl-D does; Ctrl-C ends an answer"""


class Chat(WritesText):
    """Talk with a model in the terminal.

    Type a message and read the answer as it is generated. The whole conversation is a state of constant size: no turn
    is read twice, and an answer takes the same time after an hour as at the beginning. `/help` lists what can be typed
    besides messages. Ctrl-C ends an answer, Ctrl-D the program. From a pipe, each line is a message.

    **Examples**

        gecko chat runs/chat

        gecko chat runs/chat --state book.state --system "Answer briefly."

        echo "Who are you?" | gecko chat runs/chat --temperature 0
    """

    system: str | None = option(metavar="TEXT")
    """System message, read before the first question."""
    state: str | None = option(metavar="S", reads=True)
    """Reading state of a text to talk about, written by `gecko read`."""
    max_new_tokens: int = option(512, "--max-new-tokens", "-n", min=0)
    temperature: float = 0.2
    """Sampling temperature; 0 takes the most likely token. Above 0.3, learned answers are mixed up more often."""

    def run(self) -> None:
        self.build_kernels()
        from gecko.cli.arguments import find_model
        from gecko.data.chat import find_format
        from gecko.inference.chat import Conversation
        from gecko.inference.generate import as_seeds

        sampling = self.sampling()
        model, tokenizer, before = self.load_with_state()
        chat_format = find_format(tokenizer, find_model(self.model))
        conversation = Conversation(model, tokenizer, chat_format, system=self.system, before=before)
        _say(f"conversations are written by {chat_format.source}")
        if not chat_format.tuned:
            _say(
                "this model has no chat template, so it was not tuned for chat: it continues the conversation as it "
                f"would continue any text. To tune it on chats: gecko finetune {self.model} chats.jsonl --out tuned"
            )
        if sys.stdin.isatty():
            _say(_HELP)
        seeds = itertools.count(as_seeds(self.seed, 1)[0])
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not _obey(line, conversation, self.inputs):
                    return
            elif re.search("[\ud800-\udfff]", line):  # bytes that are not UTF-8
                _say("error: a message must be UTF-8 text; this line is not. Save the messages as UTF-8.")
            elif message := line.strip():
                _write_answer(
                    conversation.ask(message, sampling=sampling, seed=next(seeds), max_new_tokens=self.max_new_tokens)
                )


def _read_line() -> str | None:
    """Return the next message or command; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):  # missing in some builds of Python
        import readline  # noqa: F401 (gives input() a history and editing keys)
    while True:
        try:
            return input("\nyou> ")
        except KeyboardInterrupt:
            _say("\n(Ctrl-D or /quit ends)")
        except EOFError:
            _say("")
            return None


def _write_answer(answer: Answer) -> None:
    """Stream an answer to standard output. Ctrl-C ends it; a second one forgets question and answer."""
    from gecko.train.health import StopSignal

    shown = False
    try:
        with StopSignal() as stop:
            for piece in answer:
                # The format may put a space before an answer.
                text = piece if shown else piece.lstrip()
                shown = shown or bool(text)
                write_piece(text)
                if stop.requested is not None:
                    answer.stop()
    except KeyboardInterrupt:
        _say("\n(the question and its answer are forgotten)")
        return
    echo()
    if stop.requested is not None:
        _say("(stopped; the conversation continues after these words)")
        if stop.requested == "SIGTERM":
            raise typer.Exit
    elif answer.cut:
        _say(f"(stopped after {answer.num_tokens} tokens; --max-new-tokens allows more)")


def _obey(line: str, conversation: Conversation, inputs: list[str]) -> bool:
    """Run a command; return False if it ends the program. Errors are printed, and the conversation continues."""
    name, _, rest = line.partition(" ")
    try:
        match name, rest.strip():
            case "/quit", _:
                return False
            case (("/save" | "/load"), ""):
                raise ValueError(f"{name} must name a file, for example {name} talk.state.")
            case "/save", file:
                path = output_file(file, STATE, inputs=inputs, option="/save")
                conversation.save(path)
                _say(f"saved to {path} ({path.stat().st_size:,} bytes)")
            case "/load", file:
                conversation.load(Path(file).expanduser())
                assert conversation.state is not None
                _say(f"continuing at position {conversation.state.position[0]:,}")
            case "/reset", _:
                conversation.reset()
                _say("the conversation is forgotten")
            case "/help", _:
                _say(_HELP)
            case _:
                raise ValueError(
                    f"a command must be one of /save, /load, /reset, /help and /quit; got {name}. A space before a "
                    "message that begins with / sends it."
                )
    except (OSError, ValueError) as error:
        _say(f"error: {error}")
    return True
