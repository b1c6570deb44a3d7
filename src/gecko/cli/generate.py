"""``gecko read``, ``generate`` and ``serve``: read texts, continue them, and serve a model over HTTP."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gecko.cli.command import INTERRUPTED, STATE, LoadsModel, StartsFromState, WritesFile, WritesText, echo, speed
from gecko.records import argument, option
from gecko.runtime.process import bound_freed_memory, require
from gecko.runtime.terminal import visible
from gecko.serving.options import Options, rows_in_memory

if TYPE_CHECKING:
    from torch import Tensor

    from gecko.cli.arguments import InputText
    from gecko.data.text_stream import TokenBytes
    from gecko.inference import TextStream
    from gecko.models.gecko import Gecko
    from gecko.state import GeckoState


class Read(StartsFromState, WritesFile):
    """Read texts and save the model's state after them.

    The size of the state does not depend on the length of the texts. `gecko generate --state` continues from it any
    number of times; `gecko state show` describes it. Several texts are read as one, in the order given. Ctrl-C saves
    the state reached so far to `--out` and prints the command that reads the rest.

    **Examples**

        gecko read runs/demo book.txt --out book.state

        gecko generate runs/demo --state book.state --prompt "In short, "

        gecko read runs/demo second.txt.gz --state book.state --out both.state --loss
    """

    books: list[str] = argument("BOOK...", reads=True)
    """Files of any length, .gz and .zst too; - is standard input."""
    out: str | None = option(None, "--out", "-o", metavar="S")
    """File for the reading state."""
    state: str | None = option(metavar="S")
    """Reading state to continue from; may be the file of --out."""
    loss: bool = False
    """Also print the model's loss on the text."""
    compact: bool = False
    """Round most of the state to bfloat16, for half the file size."""

    def run(self) -> None:
        from gecko.cli.arguments import TokenReader, named_text
        from gecko.data.text_stream import token_bytes
        from gecko.inference import read
        from gecko.train.health import StopSignal, write_notice

        def notice(signal: str, again: bool) -> None:
            first = "the piece in progress is read, then the state is saved; a second Ctrl-C stops at once and loses it"
            write_notice(signal, "stopping now: what was read is lost" if again else first)

        if self.out is None and not self.loss:
            raise ValueError("--out must name the file for the reading state, for example --out book.state; got none.")
        target = None if self.out is None else self.output_file(self.out, STATE)
        texts = [named_text(book) for book in self.books]
        model, tokenizer, before = self.load_with_state()
        with (
            StopSignal(notice) as stop,
            TokenReader(texts, tokenizer, stopped=lambda: stop.requested is not None) as reading,
        ):
            tokens, losses = reading.tokens(begin=before is None), None
            if self.loss:
                state, losses = _score(model, tokens, before, token_bytes(tokenizer))
            else:
                state = read(model, tokens, before).state
        state = state.to("cpu")
        if target is not None:
            state.save(target, compact=self.compact)
        echo(speed("read", reading.num_tokens, reading.seconds, f" ({reading.num_bytes:,} bytes)"), err=True)
        if losses is not None:
            echo(f"loss {losses[0]:.4f} nats per token, {losses[1]:.4f} nats per byte", err=True)
        where = "" if target is None else f" in {target} ({target.stat().st_size:,} bytes)"
        echo(f"position {state.position[0]:,}; state of {state.num_bytes:,} bytes{where}", err=True)
        if reading.unfinished is not None:
            echo(self.continuation(*reading.unfinished), err=True)
            raise typer.Exit(INTERRUPTED)

    def continuation(self, place: int, taken: int) -> str:
        """Return where reading stopped, and the shell command that reads the rest if the state is saved."""
        from gecko.cli.arguments import STANDARD_INPUT

        book, later = self.books[place], self.books[place + 1 :]
        stopped = f"stopped after {taken:,} bytes of {book}"
        if book == STANDARD_INPUT or self.out is None:
            return f"{stopped}."
        device = None if self.device == "auto" else self.device
        options = {"--tokenizer": self.tokenizer, "--device": device, "--dtype": self.dtype}
        given = [part for name, value in options.items() if value is not None for part in (name, value)]
        flags = ["--compact"] * self.compact + ["--loss"] * self.loss
        command = ["gecko", "read", self.model, "--state", self.out, "--out", self.out, *given, *flags]
        unpack = {".gz": "gzip -dc ", ".zst": "zstd -dc "}.get(Path(book).suffix.lower())
        skip, named = f"tail -c +{taken + 1}", shlex.quote(str(Path(book).expanduser()))
        rest = f"{skip} {named}" if unpack is None else f"{unpack}{named} | {skip}"
        return f"{stopped}; the rest: {rest} | {shlex.join([*command, STANDARD_INPUT, *later])}"


def _score(
    model: Gecko, tokens: Iterator[Tensor], state: GeckoState | None, sizes: TokenBytes
) -> tuple[GeckoState, tuple[float, float] | None]:
    """Return the state after the last token, and the loss in nats per token and per byte of all tokens but the first.

    There is no loss if no token with text was predicted.
    """
    from gecko.inference import score

    total, count, text_bytes, starts = 0.0, 0, 0, state is None

    def counted() -> Iterator[Tensor]:
        nonlocal text_bytes
        for place, ids in enumerate(tokens):
            text_bytes += sizes.of_text(ids[place == 0 :].numpy(), begins=starts and place == 1)
            yield ids

    for scored in score(model, counted(), state):
        total, count = total + float(scored.losses.double().sum()), count + len(scored.losses)
        state = scored.state
    assert state is not None, "without a state, a document start is read"
    return state, (total / count, total / text_bytes) if text_bytes else None


class Generate(WritesText, WritesFile):
    """Continue a text.

    The new text is streamed to standard output, on a terminal after the prompt in bold; times and counts go to standard
    error. Prompts of any length are read in constant memory. A reading state holds everything that the model keeps of a
    text: save it after a book, and ask about the book without reading it again.

    **Examples**

        gecko generate runs/demo --prompt "def main(" --seed 1

        cat notes.txt | gecko generate runs/demo - --stop "The end"

        gecko generate runs/demo --file book.txt -n 0 --save-state book.state

        gecko generate runs/demo --state book.state --prompt "In short, "
    """

    source: str | None = argument("-", None)
    """- reads the prompt from standard input."""
    prompt: str | None = option(None, "--prompt", "-p", metavar="TEXT")
    """Text to continue."""
    file: str | None = option(None, "--file", "-f", metavar="F", reads=True)
    """File with the text to continue, of any length; .gz and .zst too."""
    save_state: str | None = option(metavar="S")
    """File for the reading state after the last token."""
    stop: list[str] = option([], metavar="TEXT")
    """Stop before this text. Can be given several times."""

    def run(self) -> None:
        self.build_kernels()
        from gecko.cli.arguments import TokenReader
        from gecko.inference import TextStream, TokenStream, read
        from gecko.inference.generate import as_seeds
        from gecko.inference.text import check_stops

        # A mistake is reported before a long prompt is read.
        text = self.text()
        out = None if self.save_state is None else self.output_file(self.save_state, STATE, "--save-state")
        if self.state is not None and text is None:
            raise ValueError(
                "--state needs a prompt: logits are computed by reading at least one more token. Add --prompt, "
                "--file or -; --prompt ' ' is enough."
            )
        sampling, seeds = self.sampling(), as_seeds(self.seed, 1)
        check_stops(self.stop)
        model, tokenizer, before = self.load_with_state()
        # Without a state, the document-start token comes first, as in training.
        with TokenReader([] if text is None else [text], tokenizer) as reading:
            prefill = read(model, reading.tokens(begin=before is None), before)
        begin = time.perf_counter()
        tokens = TokenStream(
            model, [prefill], seeds=seeds, sampling=sampling, max_new_tokens=self.max_new_tokens,
            stop_tokens={tokenizer.document_end},
        )  # fmt: skip
        pieces = TextStream(tokens, tokenizer, self.stop, goes_on=text is not None)
        if self.prompt is not None and sys.stdout.isatty():
            typer.secho(visible(self.prompt), bold=True, nl=False)
        _write(pieces)
        wrote = speed("wrote", pieces.num_tokens, time.perf_counter() - begin)
        after = tokens.state.to("cpu")
        if out is not None:
            after.save(out)
        ended = pieces.stopped_by if pieces.stopped_by is not None else tokens.finish_reasons[0]
        echo(
            f"\n{speed('read', reading.num_tokens, reading.seconds)}\n{wrote}\nended by {ended!r}; seed {seeds[0]}; "
            f"position {after.position[0]:,}; state {after.num_bytes:,} bytes",
            err=True,
        )

    def text(self) -> InputText | None:
        """Return the prompt; None if there is none."""
        from gecko.cli.arguments import STANDARD_INPUT, InputText, named_text

        given = [value for value in (self.source, self.prompt, self.file) if value is not None]
        if len(given) > 1 or self.source not in (None, STANDARD_INPUT):
            raise ValueError(
                "a prompt must come from one of --prompt TEXT, --file F and - (standard input); got "
                f"{', '.join(given)}. Try --prompt {shlex.quote(given[0])}"
            )
        if self.prompt is not None:
            content = self.prompt.encode("utf-8", errors="surrogateescape")
            return InputText("the prompt", [content] if content else [], len(content))
        return named_text(given[0]) if given else None


def write_piece(piece: str) -> None:
    """Write a part of a model's text to standard output."""
    sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def _write(pieces: TextStream) -> None:
    for piece in pieces:
        write_piece(piece)
    if sys.stdout.isatty():
        echo()


class Serve(LoadsModel):
    """Serve a model over OpenAI's API and a web page.

    The routes are `/v1/completions`, `/v1/chat/completions`, `/v1/responses` (all with streaming), `/v1/states` and
    `/v1/models`, the web page `/`, and `/health` and `/metrics` for operators. Ctrl-C and SIGTERM let
    running requests finish.

    **Examples**

        gecko serve runs/demo

        gecko serve runs/demo --states books --api-key-file key.txt --host 0.0.0.0

        curl localhost:8000/v1/completions -d '{"prompt": "def "}' -H 'Content-Type: application/json'
    """

    port: int = option(8000, min=0, max=65535)
    """Port; 0 takes a free one."""
    rows: int | None = option(min=1, show_default="as many as 2 GiB hold, 4 to 64")
    """Sequences that are generated in one batch."""
    api_key_file: Path | None = option(metavar="F")
    """File with the key that clients must send."""
    options: Options

    def run(self) -> None:
        for module in ("starlette", "uvicorn", "prometheus_client", "jinja2"):
            require(module, "serve")
        from gecko.cli.arguments import find_model
        from gecko.serving.server import build_service, open_socket, serve

        key, name = _read_key(self.api_key_file), self.options.name or Path(self.model).expanduser().resolve().name
        bound_freed_memory()
        model, tokenizer = self.load()
        limits = replace(self.options.limits, rows=self.rows or rows_in_memory(model.empty_state().num_bytes))
        options = replace(self.options, name=name, limits=limits, api_key=key)
        service = build_service(model, tokenizer, find_model(self.model), options)
        with open_socket(options.host, self.port) as listening:
            host = f"[{options.host}]" if ":" in options.host else options.host
            echo(f"{name} is served at http://{host}:{listening.getsockname()[1]} (Ctrl-C ends)")
            echo(f"conversations are written by {service.model.chat.source}")
            serve(service, options, listening)
        echo("ended")


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    key = file.read_text(encoding="utf-8", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{file} must hold the key: one line of visible ASCII characters. Try: openssl rand -hex 32")
    return key
