"""``gecko generate``: continue a text."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gecko.cli.common import (
    STATE,
    Device,
    Dtype,
    Force,
    MaxNewTokens,
    MinP,
    Model,
    RepetitionPenalty,
    Seed,
    Temperature,
    TokenizerSpec,
    TopK,
    TopP,
    echo,
    output_file,
)
from gecko.ops.backends.cpu_library import start_building
from gecko.runtime.terminal import visible

if TYPE_CHECKING:
    from gecko.cli.arguments import Text
    from gecko.data import Tokenizer
    from gecko.inference import Prefill, TextStream
    from gecko.models.gecko import Gecko
    from gecko.state import GeckoState


def generate(
    model: Model,
    source: Annotated[str | None, typer.Argument(metavar="-", help="- reads the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="F", help="File with the text to continue, of any length; .gz and .zst too."
        ),
    ] = None,
    state: Annotated[str | None, typer.Option("--state", metavar="S", help="Reading state to continue from.")] = None,
    save_state: Annotated[
        str | None, typer.Option("--save-state", metavar="S", help="File for the reading state after the last token.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text. Can be given several times.")
    ] = None,
    tokenizer: TokenizerSpec = None,
    device: Device = "auto",
    dtype: Dtype = None,
    force: Force = False,
) -> None:
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
    if not device.startswith("cuda"):
        start_building("decoding")  # while PyTorch is imported
    from gecko.cli.arguments import check_state, load_model
    from gecko.inference import Sampling, TextStream, TokenStream
    from gecko.inference.generate import as_seeds
    from gecko.inference.text import check_stops
    from gecko.runtime.process import keep_freed_memory

    text = _prompt_text(source, prompt, file)
    inputs = [model, file, tokenizer]
    target = None
    if save_state is not None:
        target = output_file(save_state, STATE, inputs=inputs, force=force, option="--save-state")
    before = _load_state(state, text)
    sampling, seeds = Sampling(temperature, top_k, top_p, min_p, repetition_penalty), as_seeds(seed, 1)
    # A mistake is reported before a long prompt is read.
    check_stops(stop or [])
    network, vocabulary = load_model(model, tokenizer, device, dtype)
    if state is not None and before is not None:
        check_state(network, before, state, model)
    keep_freed_memory()
    watch = _Stopwatch()
    reading = _read(network, vocabulary, text, before)
    watch.lap(reading.state.position[0] - (0 if before is None else before.position[0]))
    tokens = TokenStream(
        network, [reading], seeds=seeds, sampling=sampling,
        max_new_tokens=max_new_tokens, stop_tokens={vocabulary.document_end},
    )  # fmt: skip
    pieces = TextStream(tokens, vocabulary, stop or [], goes_on=text is not None)
    if prompt is not None and sys.stdout.isatty():
        typer.secho(visible(prompt), bold=True, nl=False)
    _write(pieces)
    watch.lap(pieces.num_tokens)
    after = tokens.state.to("cpu")
    if target is not None:
        after.save(target)
    _report(watch, after, pieces, seeds[0])


def _prompt_text(source: str | None, prompt: str | None, file: str | None) -> Text | None:
    from gecko.cli.arguments import STANDARD_INPUT, Text, named_text

    given = [value for value in (source, prompt, file) if value is not None]
    if len(given) > 1 or source not in (None, STANDARD_INPUT):
        raise ValueError(
            f"a prompt must come from one of --prompt TEXT, --file F and - (standard input); got {', '.join(given)}. "
            f"Try --prompt {shlex.quote(given[0])}"
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
            "--state needs a prompt: logits are computed by reading at least one more token. Add --prompt, --file or "
            "-; --prompt ' ' is enough."
        )
    from gecko.state import GeckoState

    return GeckoState.load(Path(path).expanduser())


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
