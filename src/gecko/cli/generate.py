"""``gecko generate``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gecko.allocator import keep_freed_memory
from gecko.cli.models import Dtype, load_model
from gecko.cli.output import output_file
from gecko.cli.texts import STANDARD_INPUT, Text, TextReading, named_text
from gecko.data import Tokenizer
from gecko.generation import Reading, Sampling, TextStream, TokenStream, read
from gecko.generation.prompts import as_seeds
from gecko.generation.stopping import check_stops
from gecko.model import Gecko
from gecko.state import GeckoState


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or a run's: its newest checkpoint.")],
    source: Annotated[
        str | None, typer.Argument(metavar="-", help="Give - to read the prompt from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="F", help="Read it from a file of any length, .gz and .zst too."),
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="S", help="Go on after what this reading state has read.")
    ] = None,
    save_state: Annotated[
        str | None, typer.Option("--save-state", metavar="S", help="Write the reading state at the end to this file.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="Most tokens to write.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; higher is more varied.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that make up P together.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least P times as likely as the likeliest one.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens that came before are less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.", show_default="random")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SPEC", help="bytes or a tokenizer's path.", show_default="the model's own")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Dtype = None,
) -> None:
    """Continue a text.

    The new text goes to standard output as it is made, numbers about it to standard error. Prompts of
    any length are read in constant memory. A reading state is what a model remembers of a text: save
    it after a book, and ask about the book without reading it again.

    **Examples**

        gecko generate runs/demo --prompt "def main(" --seed 1

        cat notes.txt | gecko generate runs/demo - --stop "The end"

        gecko generate runs/demo --file book.txt -n 0 --save-state book.state

        gecko generate runs/demo --state book.state --prompt "In short, "
    """
    text = _prompt(source, prompt, file)
    target = None if save_state is None else output_file(save_state, "--save-state")
    before = _load_state(state, text)
    sampling, seeds = Sampling(temperature, top_k, top_p, min_p, repetition_penalty), as_seeds(seed, 1)
    # Not only where they are used, after a long text was read.
    check_stops(stop or [])
    network, vocabulary = load_model(model, tokenizer, device, dtype)
    keep_freed_memory()
    watch = _Stopwatch()
    reading = _read(network, vocabulary, text, before)
    watch.lap(reading.state.position[0] - (0 if before is None else before.position[0]))
    tokens = TokenStream(
        network, [reading], seeds=seeds, sampling=sampling,
        max_new_tokens=max_new_tokens, stop_tokens={vocabulary.document_end},
    )  # fmt: skip
    pieces = TextStream(tokens, vocabulary, stop or [], goes_on=text is not None)
    _write(pieces)
    watch.lap(pieces.num_tokens)
    after = tokens.state.to("cpu")
    if target is not None:
        after.save(target)
    _report(watch, after, pieces, seeds[0])


def _prompt(source: str | None, prompt: str | None, file: str | None) -> Text | None:
    given = [what for what in (source, prompt, file) if what is not None]
    if len(given) > 1 or source not in (None, STANDARD_INPUT):
        raise ValueError(
            f"a prompt must come from one of --prompt TEXT, --file F and - (standard input); got {', '.join(given)}."
        )
    if prompt is not None:
        content = prompt.encode("utf-8", errors="surrogateescape")
        return Text("the prompt", [content] if content else [], len(content))
    return named_text(given[0]) if given else None


def _load_state(path: str | None, text: Text | None) -> GeckoState | None:
    if path is None:
        return None
    if text is None:
        raise ValueError(
            "--state needs a prompt: a state knows what was read, and what comes next follows from reading one "
            "token more. Add --prompt, --file or -; --prompt ' ' is enough."
        )
    return GeckoState.load(Path(path).expanduser())


def _read(model: Gecko, tokenizer: Tokenizer, text: Text | None, state: GeckoState | None) -> Reading:
    """Read the prompt: the start of a document, as in training, unless a state goes on, and the text."""
    with TextReading([] if text is None else [text], tokenizer) as reading:
        return read(model, reading.tokens(begin=state is None), state)


class _Stopwatch:
    """Times of the phases of a command, in order, each with how many tokens it took."""

    def __init__(self) -> None:
        self.laps: list[tuple[int, float]] = []
        self._begin = time.perf_counter()

    def lap(self, tokens: int) -> None:
        end = time.perf_counter()
        self.laps.append((tokens, end - self._begin))
        self._begin = end


def _write(pieces: TextStream) -> None:
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    if sys.stdout.isatty():
        typer.echo()


def _report(watch: _Stopwatch, state: GeckoState, pieces: TextStream, seed: int) -> None:
    lines = [
        f"{verb} {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} a second"
        for verb, (tokens, seconds) in zip(("read", "wrote"), watch.laps, strict=True)
    ]
    ended = pieces.stopped_by if pieces.stopped_by is not None else pieces.tokens.finish_reasons[0]
    lines.append(f"ended by {ended!r}; seed {seed}; position {state.position[0]:,}; state {state.num_bytes:,} bytes")
    typer.echo("\n" + "\n".join(lines), err=True)
