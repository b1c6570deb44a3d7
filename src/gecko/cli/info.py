"""``gecko info``: show the size of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gecko.cli.common import Json

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from gecko.models.registry import ModelConfig


def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, training run, or name of a preset.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights in inference: float32 or bfloat16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Show a model's parameters by component, the size of its state, and the memory it needs.

    Presets are counted without allocating their weights. Numbers of parameters and bytes of the state are exact; bytes
    of activations are an estimate.

    **Examples**

        gecko info gecko-7b --length 32768 --dtype bfloat16

        gecko info runs/demo --json
    """
    from gecko.cli.arguments import named_dtype

    facts = describe(_find_config(model), named_dtype(dtype), batch, length)
    if as_json:
        typer.echo(json.dumps({"model": model, "dtype": dtype, "batch": batch, "length": length, **facts}, indent=2))
        return
    _print_tables(model, facts, batch, length, dtype)


def describe(config: ModelConfig, dtype: torch.dtype, batch: int, length: int) -> dict[str, Any]:
    """Return all numbers that the command shows."""
    from gecko.plan.counts import counts_of
    from gecko.plan.memory import inference_memory, parameters_by_component, training_memory

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
    from gecko.cli.arguments import find_model, nearest_hint
    from gecko.io.model_folder import CONFIG
    from gecko.models.registry import find_preset, load_config

    folder = Path(model).expanduser()
    if folder.exists():
        return load_config(find_model(model) / CONFIG)
    try:
        return find_preset(model)
    except ValueError as error:
        raise ValueError(
            f"MODEL must be a model folder, a training run, or a preset; there is no {folder}.{nearest_hint(folder)} "
            f"For a preset: {error}"
        ) from error


def _print_tables(model: str, facts: Mapping[str, Any], batch: int, length: int, dtype: str) -> None:
    from rich.console import Console

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
        return f"Keys and values of one sequence of {length:,} tokens"
    return "State of one sequence, at any position"


def _table(title: str, parts: Mapping[str, int], write: Callable[[int], str]) -> Table:
    from rich.table import Table

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
    """Format a number of bytes with a unit, such as ``1.5 GB``."""
    value, units = float(size), iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 1000 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
