"""``gecko read``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from gecko.allocator import keep_freed_memory
from gecko.cli.errors import INTERRUPTED
from gecko.cli.models import Dtype, load_model
from gecko.cli.output import output_file
from gecko.cli.texts import STANDARD_INPUT, TextReading, named_text
from gecko.generation import read as read_tokens
from gecko.generation import score
from gecko.model import Gecko
from gecko.state import GeckoState


def read(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a run's: its newest checkpoint.")],
    books: Annotated[
        list[str], typer.Argument(metavar="BOOK...", help="Files of any length, .gz and .zst too; - is standard input.")
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="S", help="Write the reading state to this file.")
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="S", help="Go on after what this reading state has read.")
    ] = None,
    loss: Annotated[bool, typer.Option("--loss", help="Also say how well the text was predicted.")] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="Half the size: most of the state rounded to bfloat16.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="bytes or a tokenizer's path.", show_default="the model's own")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Dtype = None,
) -> None:
    """Read books once, and keep what the model remembers of them in a file.

    The file has the same size whatever was read. `gecko generate --state` goes on from it, any number of
    times; `gecko state show` says what is in it. Several books are read as one text, in the order given.
    Ctrl-C writes the state of what was read so far to `--out`, and shows the command that reads the rest.

    **Examples**

        gecko read runs/demo book.txt --out book.state

        gecko generate runs/demo --state book.state --prompt "In short, "

        gecko read runs/demo second.txt.gz --state book.state --out both.state --loss
    """
    from gecko.train.signals import StopSignal

    target = _output(out, loss)
    texts = [named_text(book) for book in books]
    before = None if state is None else GeckoState.load(Path(state).expanduser())
    network, vocabulary = load_model(model, tokenizer, device, dtype)
    keep_freed_memory()
    with StopSignal() as stop, TextReading(texts, vocabulary, stopped=lambda: stop.requested is not None) as reading:
        done = _read(network, reading, before, loss)
    if target is not None:
        done.state.save(target, compact=compact)
    typer.echo(_summary(done, target), err=True)
    if reading.unfinished is not None:
        named_device = None if device == "auto" else device
        options = {"--state": out, "--out": out, "--tokenizer": tokenizer, "--device": named_device, "--dtype": dtype}
        given = [part for name, value in options.items() if value is not None for part in (name, value)]
        flags = ["--compact"] * compact + ["--loss"] * loss
        # Without a state, the rest would be read as a document of its own.
        command = None if out is None else ["gecko", "read", model, *given, *flags]
        typer.echo(_how_to_go_on(books, reading.unfinished, command), err=True)
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True)
class _Done:
    state: GeckoState
    """On the host."""
    tokens: int
    bytes: int
    seconds: float
    loss: float | None
    """Nats a token, where it was asked for and there was anything to predict."""
    started: bool
    """Whether the first of the tokens is a document's start, which stands for no byte."""

    @property
    def loss_a_byte(self) -> float | None:
        """With the first token after a state, of which there is no loss, taken for as long as the others are."""
        if self.loss is None or not self.bytes:
            return None
        return self.loss * (self.tokens - self.started) / self.bytes


def _output(out: str | None, loss: bool) -> Path | None:
    if out is None and not loss:
        raise ValueError("--out must name the file for the reading state, for example --out book.state; got none.")
    return None if out is None else output_file(out)


def _read(model: Gecko, reading: TextReading, before: GeckoState | None, with_loss: bool) -> _Done:
    begin, loss = time.perf_counter(), None
    tokens = reading.tokens(begin=before is None)
    if with_loss:
        state, loss = _score(model, tokens, before)
    else:
        state = read_tokens(model, tokens, before).state
    seconds = time.perf_counter() - begin
    return _Done(state.to("cpu"), reading.num_tokens, reading.num_bytes, seconds, loss, started=before is None)


def _score(model: Gecko, tokens: Iterator[Tensor], state: GeckoState | None) -> tuple[GeckoState, float | None]:
    """The state at the end, and the mean loss of all tokens but the first."""
    total, count = 0.0, 0
    for scored in score(model, tokens, state):
        total, count = total + float(scored.losses.double().sum()), count + len(scored.losses)
        state = scored.state
    assert state is not None, "without a state, a document's start is read"
    return state, total / count if count else None


def _summary(done: _Done, out: Path | None) -> str:
    lines = [
        f"read {done.tokens:,} tokens ({done.bytes:,} bytes) in {done.seconds:.2f} s, "
        f"{done.tokens / done.seconds:,.0f} tokens a second"
    ]
    if done.loss_a_byte is not None:
        lines.append(f"loss {done.loss:.4f} nats a token, {done.loss_a_byte:.4f} a byte")
    where = "" if out is None else f" in {out} ({out.stat().st_size:,} bytes)"
    lines.append(f"position {done.state.position[0]:,}; state of {done.state.num_bytes:,} bytes{where}")
    return "\n".join(lines)


def _how_to_go_on(books: Sequence[str], unfinished: tuple[int, int], command: Sequence[str] | None) -> str:
    """Where it stopped, and what reads the rest, if ``command`` does once it is given the texts."""
    place, taken = unfinished
    book = books[place]
    stopped = f"stopped after {taken:,} bytes of {book}"
    if book == STANDARD_INPUT or command is None:
        return f"{stopped}."
    unpack = {".gz": "gzip -dc ", ".zst": "zstd -dc "}.get(Path(book).suffix.lower())
    skip = f"tail -c +{taken + 1}"
    named = shlex.quote(str(Path(book).expanduser()))
    rest = f"{skip} {named}" if unpack is None else f"{unpack}{named} | {skip}"
    return f"{stopped}; the rest: {rest} | {shlex.join([*command, STANDARD_INPUT, *books[place + 1 :]])}"
