"""``gecko generate``: continue a text."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING

import typer

from gecko.cli.command import WritesFile, WritesText
from gecko.cli.common import STATE, echo, speed
from gecko.records import argument, option
from gecko.runtime.terminal import visible

if TYPE_CHECKING:
    from gecko.cli.arguments import InputText
    from gecko.inference import TextStream


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
        before, sampling, seeds = self.load_state(), self.sampling(), as_seeds(self.seed, 1)
        check_stops(self.stop)
        model, tokenizer = self.load_for(before)
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


def _write(pieces: TextStream) -> None:
    show = visible if sys.stdout.isatty() else str
    for piece in pieces:
        sys.stdout.write(show(piece))
        sys.stdout.flush()
    if sys.stdout.isatty():
        echo()
