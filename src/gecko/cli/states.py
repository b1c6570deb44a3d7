"""``gecko read`` writes reading states; ``gecko state`` shows and compares them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from gecko.cli.command import Command, StartsFromState, WritesFile
from gecko.cli.common import INTERRUPTED, STATE, echo, speed
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor

    from gecko.data.text_stream import TokenBytes
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
        from gecko.train.health import StopSignal

        if self.out is None and not self.loss:
            raise ValueError("--out must name the file for the reading state, for example --out book.state; got none.")
        target = None if self.out is None else self.output_file(self.out, STATE)
        texts, before = [named_text(book) for book in self.books], self.load_state()
        model, tokenizer = self.load_for(before)
        with (
            StopSignal(_notice) as stop,
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
            echo(_continuation_hint(self.books, reading.unfinished, self.continuation()), err=True)
            raise typer.Exit(INTERRUPTED)

    def continuation(self) -> list[str] | None:
        """Return the command that goes on from the saved state, without its texts; None if the state is not saved."""
        if self.out is None:
            return None
        device = None if self.device == "auto" else self.device
        options = {"--tokenizer": self.tokenizer, "--device": device, "--dtype": self.dtype}
        given = [part for name, value in options.items() if value is not None for part in (name, value)]
        flags = ["--compact"] * self.compact + ["--loss"] * self.loss
        return ["gecko", "read", self.model, "--state", self.out, "--out", self.out, *given, *flags]


def _notice(signal: str, again: bool) -> None:
    """Say at once what the signal does: the piece of text in progress may take long."""
    from gecko.train.health import write_notice

    first = "the piece in progress is read, then the state is saved; a second Ctrl-C stops at once and loses it"
    write_notice(signal, "stopping now: what was read is lost" if again else first)


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


def _continuation_hint(books: Sequence[str], unfinished: tuple[int, int], command: Sequence[str] | None) -> str:
    """Return where reading stopped, and the shell command that reads the rest.

    ``command`` is the gecko command that continues, without its texts; None if there is none.
    """
    from gecko.cli.arguments import STANDARD_INPUT

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


DIFFERENT = 1
"""Exit code of ``gecko state diff`` for different states, as that of ``diff``."""


class Show(Command):
    """Show a reading state: its model, its position, and the size of its parts.

    The whole file is read and its checksum is verified.

    **Example**

        gecko state show book.state
    """

    file: str = argument("FILE")
    """Reading state written by `gecko read`."""

    def run(self) -> None:
        from gecko.io.model_folder import load_tensors
        from gecko.state import GeckoState

        path = Path(self.file).expanduser()
        state, stored = GeckoState.load(path), load_tensors(path)[0]
        console = Terminal(soft_wrap=True)
        facts = Table(show_header=False, box=None, title=self.file, title_justify="left", title_style="bold")
        for name, value in _facts(state, path.stat().st_size).items():
            facts.add_row(name, value)
        console.print(facts)
        console.print(_parts_table(state, stored))


class Diff(Command):
    """Compare two reading states: their models, their positions, and every part.

    The difference of a part is ‖a − b‖ / ‖a‖. The exit code is 0 if the states are equal, and 1 if they differ.

    **Example**

        gecko state diff first.state second.state
    """

    first: str = argument("FILE")
    """Reading state written by `gecko read`."""
    second: str = argument("FILE")
    """Reading state written by `gecko read`."""

    def run(self) -> None:
        from gecko.state import GeckoState

        a, b = (GeckoState.load(Path(file).expanduser()) for file in (self.first, self.second))
        console = Terminal(soft_wrap=True)
        console.print(_model_difference(a, b))
        console.print(f"position: {_positions(a)} and {_positions(b)}")
        comparable = a.config == b.config and a.batch_size == b.batch_size
        if comparable:
            console.print(_difference_table(a, b))
        same = comparable and a.model == b.model and _equal(a, b)
        console.print("equal" if same else "not equal")
        if not same:
            raise typer.Exit(DIFFERENT)


def _facts(state: GeckoState, size: int) -> dict[str, str]:
    config, clock = state.config, state.clock
    return {
        "model": f"weights {state.model or 'unknown: the state was made in training mode'}",
        "architecture": f"{config.num_layers} layers, width {config.model_dim}, {config.num_heads} heads, "
        f"{config.attention} attention in chunks of {config.chunk_size:,}, {config.memory} memory",
        "texts": f"{state.batch_size:,}",
        "position": _positions(state),
        "document begins at": ", ".join(f"{start:,}" for start in clock.document_start.tolist()),
        "size": f"{state.num_bytes:,} bytes in memory, {size:,} in the file",
        "integrity": "the SHA-256 of names, tensors and metadata matches",
    }


def _positions(state: GeckoState) -> str:
    return ", ".join(f"{position:,}" for position in state.position)


def _parts_table(state: GeckoState, stored: dict[str, Tensor]) -> Table:
    table = _table("part", "numbers", "bytes", "in the file as", "root mean square")
    tensors, values = state.tensors(), _values(state)
    for part, names in _by_part(state).items():
        kinds = sorted({str(stored[name].dtype).removeprefix("torch.") for name in names})
        wide = [values[name] for name in names if tensors[name].is_floating_point()]
        numbers = sum(tensors[name].numel() for name in names)
        table.add_row(
            part, f"{numbers:,}", f"{sum(tensors[name].nbytes for name in names):,}", ", ".join(kinds),
            f"{_norm(wide) / sum(x.numel() for x in wide) ** 0.5:.3g}" if wide else "",
        )  # fmt: skip
    return table


def _model_difference(a: GeckoState, b: GeckoState) -> str:
    if a.config != b.config:
        ours, theirs = a.config.to_dict(), b.config.to_dict()
        fields = [f"{name} {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]
        return f"model: other architectures: {', '.join(fields)}"
    return f"model: the same, {a.model}" if a.model == b.model else f"model: other weights: {a.model} and {b.model}"


def _difference_table(a: GeckoState, b: GeckoState) -> Table:
    table = _table("part", "difference")
    ours, theirs = _values(a), _values(b)
    for part, names in _by_part(a).items():
        # Token counts are large and would hide differences of the other numbers.
        names = [name for name in names if a.tensors()[name].is_floating_point()] or names
        change = _norm([ours[name] - theirs[name] for name in names])
        scale = _norm([ours[name] for name in names])
        table.add_row(part, "none" if change == 0 else f"{change / scale:.3g}" if scale else "from zero")
    return table


def _equal(a: GeckoState, b: GeckoState) -> bool:
    import torch

    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


def _by_part(state: GeckoState) -> dict[str, list[str]]:
    from gecko.plan.counts import STATE_PARTS, state_part

    found: dict[str, list[str]] = {part: [] for part in STATE_PARTS}
    for name in state.tensors():
        found[state_part(name)].append(name)
    return {part: names for part, names in found.items() if names}


def _values(state: GeckoState) -> dict[str, Tensor]:
    """Return all tensors in float64, with the log of an empty sum (−∞) replaced by 0."""
    from gecko.ops.working_memory.rules import EMPTY_LOG

    wide = {name: x.double() for name, x in state.tensors().items()}
    return {name: x.masked_fill(x <= EMPTY_LOG / 2, 0) for name, x in wide.items()}


def _norm(tensors: list[Tensor]) -> float:
    import torch

    return float(torch.stack([x.norm() for x in tensors]).norm())


def _table(*columns: str) -> Table:
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table
