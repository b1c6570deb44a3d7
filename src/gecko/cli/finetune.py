"""``gecko finetune``: supervised fine-tuning on chats."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gecko.cli.command import TakesTokenizer
from gecko.cli.common import echo
from gecko.records import argument, option

if TYPE_CHECKING:
    from gecko.train import Run


class Finetune(TakesTokenizer):
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

    chats: str = argument("CHATS")
    """JSON Lines, one chat a line: {"messages": [{"role": "user", "content": "…"}, …]}."""
    overrides: list[str] = argument("KEY=VALUE...", [])
    """Changes to the recipe's fields."""
    out: str | None = option(metavar="FOLDER")
    """Folder of the new run."""
    lora: int | None = option(metavar="RANK", min=1, show_default="all parameters")
    """Train adapters (LoRA) of this rank."""
    epochs: float = 3
    """Number of times that each chat is read."""
    resume: bool = False
    """Continue from the newest checkpoint; start if there is none."""

    def run(self) -> None:
        begin = time.perf_counter()
        from gecko.parallel.mesh import only_first_rank_reports
        from gecko.train import train

        if not self.out:
            raise ValueError("--out must name the folder of the new run, for example --out runs/chat; got none.")
        if any((given := override).startswith("epochs=") for override in self.overrides):
            raise ValueError(f"epochs are an option, no setting of the recipe; got {given}. Try --epochs {given[7:]}")
        with only_first_rank_reports():
            run = self.recipe(self.out)
        if train(run, resume=self.resume, begin=begin).finished:
            echo(f"talk with it: gecko chat {shlex.quote(self.out)}")

    def recipe(self, out: str) -> Run:
        """Return the run to train; one that is resumed has the recipe that it was begun with."""
        from gecko.cli.arguments import find_model
        from gecko.recipes import apply_overrides, get_recipe
        from gecko.recipes.finetune import finetuning_run

        folder, begun = find_model(self.model), Path(out).expanduser() / "recipe.json"
        if self.resume and begun.is_file():
            run = apply_overrides(get_recipe(str(begun)), self.overrides)
            self.check_same(run, folder)
            return run
        return finetuning_run(
            folder, self.chats, output=out, tokenizer=self.tokenizer, lora_rank=self.lora, epochs=self.epochs,
            overrides=self.overrides,
        )  # fmt: skip

    def check_same(self, run: Run, folder: Path) -> None:
        """Raise ValueError if the command names other things than the run that it would resume."""
        begun = {"MODEL": run.init_from, "CHATS": run.data.source, "--lora": run.lora_rank}
        named = {"MODEL": str(folder), "CHATS": self.chats, "--lora": self.lora}
        # A run that was resumed has a newer checkpoint.
        if run.init_from is not None and Path(run.init_from).parent == folder.parent:
            named["MODEL"] = run.init_from
        for name, value in named.items():
            if value != begun[name]:
                raise ValueError(
                    f"{name} must be what the run in {run.folder} was begun with, {begun[name]}; got {value}. Leave "
                    "it as it was, or start a new run with another --out."
                )
