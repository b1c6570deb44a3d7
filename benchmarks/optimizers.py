"""Muon beside AdamW on ``tiny``: curves of several seeds, each optimizer at the best of the same learning rates.

    python benchmarks/optimizers.py --out runs/optimizers --write     # hours on a CPU; the same command continues
    python benchmarks/optimizers.py --out runs/optimizers --steps 20 --tuning-steps 10 --seeds 0    # a trial

It writes one recipe per optimizer and runs ``gecko compare``, whose page has the curves and the differences. Then it
trains Muon once more with three quarters of the steps, at the same rate, and compares that with AdamW's last loss. At
last it trains with AdamW and linear layers in emulated float8, at AdamW's rate (extra ``quantize``).
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import parsed, parser_of, publish, table, trained_loss

from gecko.recipes import apply_overrides, get_recipe
from gecko.train import Run
from gecko.train.metrics import METRICS, read_metrics
from gecko.train.run import RECIPE

PART = 0.75
"""Part of the steps after which Muon should be where AdamW ends."""

OPTIMIZERS = ("adamw", "muon")


def write_recipes(folder: Path, recipe: str, steps: int) -> list[Path]:
    """Write the recipe with each optimizer, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in OPTIMIZERS:
        changes = [f"steps={steps}", "minutes=none", f"optimizer.name={name}"]
        changes.append(f"evaluation.every={max(1, steps // 40)}")
        run = dataclasses.replace(apply_overrides(get_recipe(recipe), changes), output=str(folder / name))
        paths.append(folder / f"{name}.json")
        run.save(paths[-1])
    return paths


def held_out(folder: Path, seeds: Sequence[str]) -> dict[int, float]:
    """Return the mean held-out loss of all seeds by step, in nats per byte."""
    curves = [
        {r["step"]: r["nats_per_byte"] for r in read_metrics(folder / f"seed-{seed}" / METRICS) if r["kind"] != "train"}
        for seed in seeds
    ]
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in curves[0]}


def trained_again(folder: Path, runs: Path, seeds: Sequence[str], part: float = 1.0, **changes: Any) -> list[Run]:
    """Train the runs of all seeds again with ``part`` of the steps and other changes, and return them."""
    again = []
    for seed in seeds:
        before = Run.load(runs / f"seed-{seed}" / RECIPE)
        assert before.steps is not None
        output = str(folder / f"seed-{seed}")
        again.append(dataclasses.replace(before, steps=round(part * before.steps), output=output, **changes))
        trained_loss(again[-1])
    return again


def main() -> None:
    parser = parser_of(
        __doc__, recipe=("tiny", "to be changed"), steps=(1000, "of each run"), tuning_steps=(200, "for the rates"),
        learning_rates=("2e-3,4e-3,8e-3,16e-3", "of both"), seeds=("0,1,2", "of each optimizer"),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to both recipes")
    given = parsed(parser)
    recipes, seeds = write_recipes(given.out / "recipes", given.recipe, given.steps), given.seeds.split(",")
    compared = given.out / "comparison"
    command = [sys.executable, "-m", "gecko", "compare", *map(str, recipes), "--out", str(compared)]
    command += [*given.overrides, "--seeds", given.seeds, "--learning-rates", given.learning_rates]
    subprocess.run([*command, "--tuning-steps", str(given.tuning_steps)], check=True)
    short = trained_again(given.out / "short", compared / "muon", seeds, PART)
    float8 = trained_again(given.out / "float8", compared / "adamw", seeds, precision="float8_emulated")
    adamw, muon = ([Run.load(compared / n / f"seed-{seed}" / RECIPE) for seed in seeds] for n in OPTIMIZERS)
    ends = {"AdamW": adamw, "Muon": muon, f"Muon, {PART:.0%} of the steps": short, "AdamW, float8 emulated": float8}
    finals = {name: list(map(trained_loss, runs)) for name, runs in ends.items()}
    results = [
        (name, runs[0].steps, runs[0].optimizer.learning_rate, statistics.fmean(finals[name]),
         ", ".join(f"{loss:.4f}" for loss in finals[name]))
        for name, runs in ends.items()
    ]  # fmt: skip
    curves = [held_out(runs[0].folder.parent, seeds) for runs in (adamw, muon, float8)]
    steps, one = sorted(curves[0]), adamw[0]
    shown = [steps[round(part * (len(steps) - 1) / 10)] for part in range(1, 11)]
    above = results[2][3] - results[0][3]
    reached = next((step for step, loss in curves[1].items() if loss <= curves[0][steps[-1]]), None)
    publish(
        "optimizers.md", given, "Muon and float8 beside AdamW", "",
        f"`{one.recipe or 'tiny'}` in {one.precision}, {one.batch_size} rows of {one.sequence_length} tokens a step, "
        f"{len(seeds)} seeds. Each optimizer uses the best of the same learning rates, found with one seed and fewer "
        "steps. Losses are held out, in nats per byte. Emulated float8 rounds as the layers of a GPU do. It uses "
        "AdamW's rate.",
        table(["optimizer", "steps|,", "rate|g", "final loss, mean|.4f", "of each seed"], results),
        f"With {PART:.0%} of the steps, Muon's final loss is "
        f"{'at most that of AdamW' if above <= 0 else f'{above:.4f} above that of AdamW'}. Within the run of all "
        + ("steps, whose rate is still high then, its curve does not reach AdamW's last loss." if reached is None
           else f"steps, its curve reaches AdamW's last loss in step {reached}."),
        "Curves, mean of the seeds, on fewer rows than the final losses:",
        table(["step|,", "AdamW|.4f", "Muon|.4f", "AdamW, float8 emulated|.4f"],
              ((step, *(curve[step] for curve in curves)) for step in shown)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
