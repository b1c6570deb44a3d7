"""Types of the arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, or training run (its newest checkpoint is used).")
]
Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, or path of a run's recipe.json.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes to the recipe's fields.")]
TokenizerSpec = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="SPEC", help="bytes, or the path of a tokenizer.", show_default="the model's own"
    ),
]
Device = Annotated[str, typer.Option("--device", help="Device: auto (CUDA if it is available), cpu, cuda, or cuda:N.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Dtype of the weights: float32 or bfloat16.", show_default="as stored")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a file of another kind. Files that the command reads are never replaced."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
