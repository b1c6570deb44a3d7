"""``gecko info``, ``doctor``, ``state show`` and ``state diff``: describe models, machines and reading states."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gecko.cli.command import Command, echo
from gecko.cli.plan import print_parts, readable, with_total
from gecko.records import argument, option
from gecko.runtime.terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor

    from gecko.models import ModelConfig
    from gecko.state import GeckoState

UNHEALTHY = DIFFERENT = 1
"""Exit codes of ``gecko doctor`` if a check failed, and of ``gecko state diff`` for other states, as of ``diff``."""


class Info(Command):
    """Show a model's parameters by component, the size of its state, and the memory it needs.

    Presets are counted without allocating their weights. Numbers of parameters and bytes of the state are exact; bytes
    of activations are an estimate.

    **Examples**

        gecko info gecko-7b --length 32768 --dtype bfloat16

        gecko info runs/demo --json
    """

    model: str = argument("MODEL")
    """Model folder, training run, or name of a preset."""
    length: int = option(4096, min=1)
    """Tokens per sequence."""
    batch: int = option(1, min=1)
    """Sequences per batch."""
    dtype: str = "float32"
    """Dtype of the weights in inference: float32 or bfloat16."""
    as_json: bool = option(False, "--json")
    """Print JSON instead of tables."""

    def run(self) -> None:
        from gecko.cli.arguments import named_dtype
        from gecko.plan.counts import counts_of, inference_memory, parameters_by_component, training_memory

        config, dtype, size = _find_config(self.model), named_dtype(self.dtype), (self.batch, self.length)
        parameters = with_total(parameters_by_component(config))
        state = with_total(counts_of(config).state(self.length, dtype.itemsize))
        memory = {
            "inference": with_total(inference_memory(config, dtype, *size)),
            "training": with_total(training_memory(config, *size, recompute=False)),
            "training, activations recomputed": with_total(training_memory(config, *size, recompute=True)),
        }
        if self.as_json:
            facts = {name: getattr(self, name) for name in ("model", "dtype", "batch", "length")}
            facts |= {"config": config.to_dict(), "parameters": parameters}
            echo(json.dumps(facts | {"state_bytes_per_row": state, "memory_bytes": memory}, indent=2))
            return
        console = Terminal(markup=True)
        architecture = ", ".join(f"{name} {value}" for name, value in config.to_dict().items())
        console.print(f"[bold]{escape(self.model)}[/bold]: {escape(architecture)}\n", soft_wrap=False)
        print_parts(console, "Parameters", parameters, "{:,}".format)
        of_a_row = f"Keys and values of one sequence of {self.length:,} tokens" if "keys" in state else None
        print_parts(console, of_a_row or "State of one sequence, at any position", state, readable)
        for name, parts in memory.items():
            of = self.dtype if name == "inference" else "float32, AdamW"
            print_parts(console, f"Memory for {name}: {self.batch} × {self.length:,} tokens, {of}", parts, readable)


def _find_config(model: str) -> ModelConfig:
    from gecko.cli.arguments import find_model, nearest_hint
    from gecko.io.checkpoints import shipped_models
    from gecko.io.model_folder import CONFIG
    from gecko.models import find_preset, load_config

    folder = Path(model).expanduser()
    if folder.exists() or model in shipped_models():
        return load_config(find_model(model) / CONFIG)
    try:
        return find_preset(model)
    except ValueError as error:
        raise ValueError(
            f"MODEL must be a model folder, a training run, or a preset; there is no {folder}.{nearest_hint(folder)} "
            f"For a preset: {error}"
        ) from error


class Doctor(Command):
    """Describe this machine, and test that the operators compute correctly on it.

    The self-test runs on the CPU and, if there is one, on the GPU. It takes seconds. The exit code is 1 if a check
    fails.

    **Example**

        gecko doctor
    """

    def run(self) -> None:
        import torch

        from gecko.cli import doctor

        console = Terminal(markup=True)
        _print_facts(console, "This machine", doctor.machine().items())
        _print_facts(console, "Used for training and inference", doctor.paths().items())
        if packages := doctor.optional_packages():
            install = f"missing; pip install '{doctor.DISTRIBUTION}[{{}}]'"
            rows = ((name, version or install.format(extra)) for name, extra, version in packages)
            _print_facts(console, "Optional packages", rows)
        else:
            missing = f"{doctor.DISTRIBUTION} is not installed. Run: pip install -e ."
            console.print(f"Optional packages: unknown, as {missing}\n")
        findings = []
        for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            with console.status(f"testing on {device}"):
                found = doctor.self_test(torch.device(device))
            verdicts = {True: Text("pass", "green"), False: Text("FAIL", "bold red")}
            checks = ((name, verdicts[passed], detail) for name, passed, detail in found)
            _print_facts(console, f"Self-test on {device}", checks)
            findings += found
        failed = sum(not finding.passed for finding in findings)
        if failed:
            console.print(
                f"[bold red]{failed} of {len(findings)} checks failed.[/] Do not trust results on this machine."
            )
            raise typer.Exit(UNHEALTHY)
        console.print(f"[bold green]All {len(findings)} checks passed.[/]")


def _print_facts(console: Console, title: str, rows: Iterable[Iterable[str | Text]]) -> None:
    """Print rows of texts, which are shown as they are."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table, "")


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
        config, tensors, values = state.config, state.tensors(), _values(state)
        facts = Table(show_header=False, box=None, title=self.file, title_justify="left", title_style="bold")
        for name, value in {
            "model": f"weights {state.model or 'unknown: the state was made in training mode'}",
            "architecture": f"{config.num_layers} layers, width {config.model_dim}, {config.num_heads} heads, "
            f"{config.attention} attention in chunks of {config.chunk_size:,}, {config.memory} memory",
            "texts": f"{state.batch_size:,}",
            "position": _listed(state.position),
            "document begins at": _listed(state.clock.document_start.tolist()),
            "size": f"{state.num_bytes:,} bytes in memory, {path.stat().st_size:,} in the file",
            "integrity": "the SHA-256 of names, tensors and metadata matches",
        }.items():
            facts.add_row(name, value)
        table = _table("part", "numbers", "bytes", "in the file as", "root mean square")
        for part, names in _by_part(state).items():
            kinds = sorted({str(stored[name].dtype).removeprefix("torch.") for name in names})
            wide = [values[name] for name in names if tensors[name].is_floating_point()]
            numbers, size = sum(tensors[name].numel() for name in names), sum(tensors[name].nbytes for name in names)
            table.add_row(
                part, f"{numbers:,}", f"{size:,}", ", ".join(kinds),
                f"{_norm(wide) / sum(x.numel() for x in wide) ** 0.5:.3g}" if wide else "",
            )  # fmt: skip
        console = Terminal(soft_wrap=True)
        console.print(facts)
        console.print(table)


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
        import torch

        from gecko.state import GeckoState

        a, b = (GeckoState.load(Path(file).expanduser()) for file in (self.first, self.second))
        ours, theirs, console = a.tensors(), b.tensors(), Terminal(soft_wrap=True)
        comparable = a.config == b.config and a.batch_size == b.batch_size
        if a.config != b.config:
            fields, others = a.config.to_dict(), b.config.to_dict()
            unlike = [f"{name} {fields[name]} and {others[name]}" for name in fields if fields[name] != others[name]]
            console.print(f"model: other architectures: {', '.join(unlike)}")
        else:
            known = f"the same, {a.model}" if a.model == b.model else f"other weights: {a.model} and {b.model}"
            console.print(f"model: {known}")
        console.print(f"position: {_listed(a.position)} and {_listed(b.position)}")
        if comparable:
            table, x, y = _table("part", "difference"), _values(a), _values(b)
            for part, names in _by_part(a).items():
                # Token counts are large and would hide differences of the other numbers.
                names = [name for name in names if ours[name].is_floating_point()] or names
                change, scale = _norm([x[name] - y[name] for name in names]), _norm([x[name] for name in names])
                table.add_row(part, "none" if change == 0 else f"{change / scale:.3g}" if scale else "from zero")
            console.print(table)
        same = comparable and a.model == b.model and all(torch.equal(ours[name], theirs[name]) for name in ours)
        console.print("equal" if same else "not equal")
        if not same:
            raise typer.Exit(DIFFERENT)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _by_part(state: GeckoState) -> dict[str, list[str]]:
    from gecko.plan.counts import STATE_PARTS, state_part

    found = {part: [name for name in state.tensors() if state_part(name) == part] for part in STATE_PARTS}
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
