"""``gecko state``: what reading states hold, and how two of them differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gecko.files import load_tensors
from gecko.ops.working_memory.rules import EMPTY_LOG
from gecko.plan.gecko import STATE_PARTS, state_part
from gecko.state import GeckoState

DIFFERENT = 1
"""Exit code of ``diff``, as that of the tool it is named after."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Look at reading states.")

StateFile = Annotated[str, typer.Argument(metavar="FILE", help="A reading state, as `gecko read` writes it.")]


@app.command()
def show(file: StateFile) -> None:
    """Show what a state has read, which model it is of, and what it consists of.

    The whole file is read and its checksum computed: a damaged one ends in an error.
    """
    path = Path(file).expanduser()
    state, stored = GeckoState.load(path), load_tensors(path)[0]
    console = Console(highlight=False, soft_wrap=True)
    facts = Table(show_header=False, box=None, title=file, title_justify="left", title_style="bold")
    for name, value in _facts(state, path.stat().st_size).items():
        facts.add_row(name, value)
    console.print(facts)
    console.print(_parts_table(state, stored))


@app.command()
def diff(first: StateFile, second: StateFile) -> None:
    """Compare two states: their models, their positions, and every part.

    The difference of a part is ‖a − b‖ / ‖a‖. Exit code 0: they are equal, 1: they are not.
    """
    a, b = (GeckoState.load(Path(file).expanduser()) for file in (first, second))
    console = Console(highlight=False, soft_wrap=True)
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
        "model": f"weights {state.model or 'unknown: it was read while training'}",
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
        # Beside the counts of tokens, no number of a part would be seen.
        names = [name for name in names if a.tensors()[name].is_floating_point()] or names
        change = _norm([ours[name] - theirs[name] for name in names])
        scale = _norm([ours[name] for name in names])
        table.add_row(part, "none" if change == 0 else f"{change / scale:.3g}" if scale else "from zero")
    return table


def _equal(a: GeckoState, b: GeckoState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


def _by_part(state: GeckoState) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {part: [] for part in STATE_PARTS}
    for name in state.tensors():
        found[state_part(name)].append(name)
    return {part: names for part, names in found.items() if names}


def _values(state: GeckoState) -> dict[str, Tensor]:
    """All tensors as float64; the logarithm of an empty sum, which stands for −∞, as 0."""
    wide = {name: x.double() for name, x in state.tensors().items()}
    return {name: x.masked_fill(x <= EMPTY_LOG / 2, 0) for name, x in wide.items()}


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([x.norm() for x in tensors]).norm())


def _table(*columns: str) -> Table:
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table
