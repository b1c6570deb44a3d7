"""``gecko generate``: continue a text."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING

import typer

from gecko.cli.command import Writer, Writing
from gecko.cli.common import STATE, echo
from gecko.records import argument, option
from gecko.runtime.terminal import visible

if TYPE_CHECKING:
    from gecko.cli.arguments import Text
    from gecko.data import Tokenizer
    from gecko.inference import Prefill, TextStream
    from gecko.models.gecko import Gecko
    from gecko.state import GeckoState


class Generate(Writer, Writing):
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
        from gecko.inference import TextStream, TokenStream
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
        before, sampling, seeds = self.load_state(), self.sampling(), as_seeds(self.seed, 1)
        check_stops(self.stop)
        model, tokenizer = self.load_for(before)
        watch = _Stopwatch()
        reading = _read(model, tokenizer, text, before)
        watch.lap(reading.state.position[0] - (0 if before is None else before.position[0]))
        tokens = TokenStream(
            model, [reading], seeds=seeds, sampling=sampling, max_new_tokens=self.max_new_tokens,
            stop_tokens={tokenizer.document_end},
        )  # fmt: skip
        pieces = TextStream(tokens, tokenizer, self.stop, goes_on=text is not None)
        if self.prompt is not None and sys.stdout.isatty():
            typer.secho(visible(self.prompt), bold=True, nl=False)
        _write(pieces)
        watch.lap(pieces.num_tokens)
        after = tokens.state.to("cpu")
        if out is not None:
            after.save(out)
        _report(watch, after, pieces, seeds[0])

    def text(self) -> Text | None:
        """Return the prompt; None if there is none."""
        from gecko.cli.arguments import STANDARD_INPUT, Text, named_text

        given = [value for value in (self.source, self.prompt, self.file) if value is not None]
        if len(given) > 1 or self.source not in (None, STANDARD_INPUT):
            raise ValueError(
                "a prompt must come from one of --prompt TEXT, --file F and - (standard input); got "
                f"{', '.join(given)}. Try --prompt {shlex.quote(given[0])}"
            )
        if self.prompt is not None:
            content = self.prompt.encode("utf-8", errors="surrogateescape")
            return Text("the prompt", [content] if content else [], len(content))
        return named_text(given[0]) if given else None


def _read(model: Gecko, tokenizer: Tokenizer, text: Text | None, state: GeckoState | None) -> Prefill:
    """Read the prompt. Without a state, the document-start token comes first, as in training."""
    from gecko.cli.arguments import TextPrefill
    from gecko.inference import read

    with TextPrefill([] if text is None else [text], tokenizer) as reading:
        return read(model, reading.tokens(begin=state is None), state)


class _Stopwatch:
    """Number of tokens and seconds of each phase of a command, in order."""

    def __init__(self) -> None:
        self.laps: list[tuple[int, float]] = []
        self._begin = time.perf_counter()

    def lap(self, tokens: int) -> None:
        end = time.perf_counter()
        self.laps.append((tokens, end - self._begin))
        self._begin = end


def _write(pieces: TextStream) -> None:
    show = visible if sys.stdout.isatty() else str
    for piece in pieces:
        sys.stdout.write(show(piece))
        sys.stdout.flush()
    if sys.stdout.isatty():
        echo()


def _report(watch: _Stopwatch, state: GeckoState, pieces: TextStream, seed: int) -> None:
    lines = [
        f"{verb} {tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"
        for verb, (tokens, seconds) in zip(("read", "wrote"), watch.laps, strict=True)
    ]
    ended = pieces.stopped_by if pieces.stopped_by is not None else pieces.tokens.finish_reasons[0]
    lines.append(f"ended by {ended!r}; seed {seed}; position {state.position[0]:,}; state {state.num_bytes:,} bytes")
    echo("\n" + "\n".join(lines), err=True)
