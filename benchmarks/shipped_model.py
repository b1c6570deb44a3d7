"""Write the shipped model ``books`` from a finished run: bfloat16 weights, recipe, and a card with measured numbers.

    gecko train books data.source=books/train data.validation=books/held_out --out runs/books
    python benchmarks/shipped_model.py runs/books books/held_out

The card states the loss of the stored weights on the held-out texts, and what the command ``gecko generate`` writes:
that of the wheel in a new environment, with its seconds from start to end.
"""

from __future__ import annotations

import statistics
from datetime import date
from pathlib import Path
from statistics import fmean

import torch
from first_text import installed_starts
from measuring import START, parsed, parser_of, size_of

import gecko
from gecko.inference.prefill import inference
from gecko.io.checkpoints import SHIPPED, model_folder
from gecko.runtime.process import processor_name
from gecko.train import Run
from gecko.train.metrics import METRICS, read_metrics

ROW = 2048
"""Tokens of a row in training, and of one that is scored."""
CARD = Path(__file__).parent / "shipped_model_card.md"


def row_losses(model: gecko.Gecko, texts: Path, rows: int) -> list[float]:
    """Return the nats per byte of ``rows`` equally distant rows of every text, each read from an empty state."""
    losses = []
    with inference(model):
        for file in sorted(texts.glob("*.txt")):
            data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
            for at in torch.linspace(0, len(data) - ROW, rows).long().tolist():
                row = torch.cat((START, data[at : at + ROW]))[None]
                losses.append(float(model.token_losses(row[:, :-1], row[:, 1:])[0].mean()))
    return losses


def main() -> None:
    parser = parser_of(
        __doc__, write=False, bytes=(31_337_482, "of the training texts"), rows=(24, "of each text that are scored")
    )
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("texts", type=Path, help="folder with the held-out texts")
    given = parsed(parser)
    source, target = model_folder(given.run), SHIPPED / "books"
    exact = gecko.load(source)
    loss = fmean(row_losses(exact, given.texts, given.rows))
    exact.bfloat16().save(target)
    recipe = Run.load(source / "recipe.json")
    recipe.save(target / "recipe.json")
    stored = fmean(row_losses(gecko.load(target).float(), given.texts, given.rows))
    starts = installed_starts()
    steps = max(record["step"] for record in read_metrics(given.run / METRICS) if record["kind"] == "train")
    step = recipe.batch_size * recipe.sequence_length
    card = CARD.read_text(encoding="utf-8").format(
        date=date.today(), processor=processor_name(), parameters=size_of(exact),
        bytes=(target / "model.safetensors").stat().st_size, tokens_per_step=step, steps=steps,
        passes=steps * step / given.bytes, rows=given.rows, loss=loss, stored=stored, text=starts.text,
        first=statistics.median(starts.first), later=statistics.median(starts.later),
    )  # fmt: skip
    (target / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
