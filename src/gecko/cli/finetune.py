"""``gecko finetune``: supervised fine-tuning on chats."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gecko.cli.common import Model, Overrides, TokenizerSpec, echo

if TYPE_CHECKING:
    from gecko.train import Run


def finetune(
    model: Model,
    chats: Annotated[
        str,
        typer.Argument(
            metavar="CHATS", help='JSON Lines, one chat a line: {"messages": [{"role": "user", "content": "…"}, …]}.'
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FOLDER", help="Folder of the new run.")] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora", metavar="RANK", min=1, help="Train adapters (LoRA) of this rank.", show_default="all parameters"
        ),
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Number of times that each chat is read.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint; start if there is none.")
    ] = False,
    tokenizer: TokenizerSpec = None,
) -> None:
    """Fine-tune a model on chats.

    The model learns the assistant's answers; it only reads the other messages. Chats are packed into rows, and the
    state is reset between them. Up to 5 % of the answers are held out. The folder gets what `gecko train` writes; every
    checkpoint is a model with its chat template, which `gecko chat` and `gecko serve` use.

    **Examples**

        gecko finetune runs/demo chats.jsonl --out runs/chat

        gecko finetune runs/demo chats.jsonl --lora 16 --epochs 5 --out runs/adapted

        gecko finetune runs/demo chats.jsonl optimizer.learning_rate=1e-4 --out runs/slow

        gecko chat runs/chat
    """
    begin = time.perf_counter()
    from gecko.cli.arguments import find_model
    from gecko.parallel.mesh import only_first_rank_reports
    from gecko.recipes import apply_overrides, get_recipe
    from gecko.recipes.finetune import finetuning_run
    from gecko.train import train as run_training

    if not out:
        raise ValueError("--out must name the folder of the new run, for example --out runs/chat; got none.")
    recipe = Path(out).expanduser() / "recipe.json"
    if any((given := override).startswith("epochs=") for override in overrides or []):
        raise ValueError(f"epochs are an option, no setting of the recipe; got {given}. Try --epochs {given[7:]}")
    with only_first_rank_reports():
        folder = find_model(model)
        if resume and recipe.is_file():
            run = apply_overrides(get_recipe(str(recipe)), overrides or [])
            _check_same(run, folder, chats, lora)
        else:
            run = finetuning_run(
                folder, chats, output=out, tokenizer=tokenizer, lora_rank=lora, epochs=epochs,
                overrides=overrides or [],
            )  # fmt: skip
    result = run_training(run, resume=resume, begin=begin)
    if result.finished:
        echo(f"talk with it: gecko chat {shlex.quote(out)}")


def _check_same(run: Run, folder: Path, chats: str, lora: int | None) -> None:
    """Raise ValueError if the command names other things than the run that it would resume."""
    begun = {"MODEL": run.init_from, "CHATS": run.data.source, "--lora": run.lora_rank}
    named = {"MODEL": str(folder), "CHATS": chats, "--lora": lora}
    # A run that was resumed has a newer checkpoint.
    if run.init_from is not None and Path(run.init_from).parent == folder.parent:
        named["MODEL"] = run.init_from
    for name, value in named.items():
        if value != begun[name]:
            raise ValueError(
                f"{name} must be what the run in {run.folder} was begun with, {begun[name]}; got {value}. Leave it as "
                "it was, or start a new run with another --out."
            )
