"""``gecko info``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gecko.baselines import ModelConfig, load_config
from gecko.baselines.models import find_preset
from gecko.cli.models import find_model, named_dtype, nearest_hint
from gecko.plan.counts import counts_of
from gecko.plan.footprint import inference_memory, parameters_by_component, training_memory


def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a run's, or the name of a preset.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Texts side by side.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the weights in inference: float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a model is made of: parameters by component, state size, memory.

    Presets are not built, so the largest needs no more memory than the smallest. Numbers of parameters
    and of state bytes are exact; memory for activations is an estimate.

    **Examples**

        gecko info gecko-7b --length 32768 --dtype bfloat16

        gecko info runs/demo --json
    """
    facts = describe(_find_config(model), named_dtype(dtype), batch, length)
    if as_json:
        typer.echo(json.dumps({"model": model, "dtype": dtype, "batch": batch, "length": length, **facts}, indent=2))
        return
    _print_tables(model, facts, batch, length, dtype)


def describe(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, Any]:
    """All numbers that the command shows."""
    parameters, state = parameters_by_component(config), counts_of(config).state(length, dtype.itemsize)
    memory = {
        "inference": inference_memory(config, dtype, batch, length),
        "training": training_memory(config, batch, length, recompute=False),
        "training, activations recomputed": training_memory(config, batch, length, recompute=True),
    }
    return {
        "config": config.to_dict(),
        "parameters": {**parameters, "total": sum(parameters.values())},
        "state_bytes_per_row": {**state, "total": sum(state.values())},
        "memory_bytes": {name: {**parts, "total": sum(parts.values())} for name, parts in memory.items()},
    }


def _find_config(model: str) -> ModelConfig:
    from gecko.store import CONFIG

    folder = Path(model).expanduser()
    if folder.exists():
        return load_config(find_model(model) / CONFIG)
    try:
        return find_preset(model)
    except ValueError as error:
        raise ValueError(
            f"MODEL must be a model's folder, a run's, or a preset; there is no {folder}.{nearest_hint(folder)} "
            f"As for presets: {error}"
        ) from error


def _print_tables(model: str, facts: Mapping[str, Any], batch: int, length: int, dtype: str) -> None:
    console = Console(highlight=False)
    architecture = ", ".join(f"{name} {value}" for name, value in facts["config"].items())
    console.print(f"[bold]{model}[/bold]: {architecture}\n", soft_wrap=False)
    console.print(_table("Parameters", facts["parameters"], "{:,}".format))
    console.print(_table(_state_title(facts, length), facts["state_bytes_per_row"], readable))
    for name, parts in facts["memory_bytes"].items():
        kind = dtype if name == "inference" else "float32, AdamW"
        console.print(_table(f"Memory for {name}: {batch} × {length:,} tokens, {kind}", parts, readable))


def _state_title(facts: Mapping[str, Any], length: int) -> str:
    if "keys" in facts["state_bytes_per_row"]:
        return f"Keys and values of one text of {length:,} tokens"
    return "Reading state of one text, at any position"


def _table(title: str, parts: Mapping[str, int], write: Callable[[int], str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=52)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    total = parts["total"]
    for name, value in parts.items():
        if name == "total":
            table.add_section()
        table.add_row(name, write(value), f"{value / total:.1%}" if total else "")
    return table


def readable(size: int) -> str:
    """Bytes in the unit that suits them."""
    value, units = float(size), iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 1000 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
