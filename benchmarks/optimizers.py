"""Muon beside AdamW on ``tiny``: curves of several seeds, each optimizer at the best of the same learning rates.

    python benchmarks/optimizers.py --out runs/optimizers --write     # hours on a CPU; the same command continues
    python benchmarks/optimizers.py --out runs/optimizers --steps 20 --tuning-steps 10 --seeds 0    # a trial

It writes one recipe per optimizer and runs ``gecko compare``, whose page has the curves and the differences. Then it
trains Muon once more with three quarters of the steps, at the same rate, and compares that with AdamW's last loss. At
last it trains with AdamW and linear layers in emulated float8, at AdamW's rate (extra ``quantize``).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measuring import parser_of, publish

from gecko.recipes import apply_overrides, get_recipe
from gecko.train import Run, train
from gecko.train.finish import RESULTS
from gecko.train.metrics import METRICS, read_metrics
from gecko.train.run import RECIPE
from gecko.train.throughput import describe_hardware

PART = 0.75
"""Part of the steps after which Muon should be where AdamW ends."""

OPTIMIZERS = ("adamw", "muon")


def write_recipes(folder: Path, recipe: str, steps: int) -> list[Path]:
    """Write the recipe with each optimizer, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in OPTIMIZERS:
        changes = [
            f"steps={steps}",
            "minutes=none",
            f"optimizer.name={name}",
            f"evaluation.every={max(1, steps // 40)}",
        ]
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
        run = dataclasses.replace(before, steps=round(part * before.steps), output=output, **changes)
        if not (run.folder / RESULTS).is_file() and not train(run, resume=True).finished:
            raise SystemExit("stopped; the same command continues")
        again.append(run)
    return again


def final_loss(run: Run) -> float:
    return json.loads((run.folder / RESULTS).read_text(encoding="utf-8"))["nats_per_byte"]


def report(
    compared: Path, short: Sequence[Run], float8: Sequence[Run], seeds: Sequence[str], command: str
) -> list[str]:
    curves = {name: held_out(compared / name, seeds) for name in OPTIMIZERS}
    curves["float8"] = held_out(float8[0].folder.parent, seeds)
    runs = {n: [Run.load(compared / n / f"seed-{seed}" / RECIPE) for seed in seeds] for n in OPTIMIZERS}
    one = runs["adamw"][0]
    machine = "; ".join(describe_hardware(torch.device("cpu"), 1).values())
    last = statistics.fmean(map(final_loss, runs["adamw"]))
    steps = sorted(curves["adamw"])
    shown = [steps[round(part * (len(steps) - 1) / 10)] for part in range(1, 11)]
    rows = [f"| {step} | {' | '.join(f'{curve[step]:.4f}' for curve in curves.values())} |" for step in shown]
    ends = {"AdamW": runs["adamw"], "Muon": runs["muon"], f"Muon, {PART:.0%} of the steps": list(short),
            "AdamW, float8 emulated": list(float8)}  # fmt: skip
    results = [
        f"| {name} | {some[0].steps} | {some[0].optimizer.learning_rate:g} | "
        f"{statistics.fmean(map(final_loss, some)):.4f} | {', '.join(f'{final_loss(run):.4f}' for run in some)} |"
        for name, some in ends.items()
    ]
    reached = next((step for step, loss in curves["muon"].items() if loss <= curves["adamw"][steps[-1]]), None)
    ended = statistics.fmean(map(final_loss, short))
    verdict = "at most that of AdamW" if ended <= last else f"{ended - last:.4f} above that of AdamW"
    missed = "Within the run of all steps, whose rate is still high then, its curve does not reach AdamW's last loss."
    within = f"Within the run of all steps, its curve reaches AdamW's last loss in step {reached}."
    return [
        "# Muon and float8 beside AdamW", "",
        f"{date.today()}, {machine}. Command: `{command}`.", "",
        f"`{one.recipe or 'tiny'}` in {one.precision}, {one.batch_size} rows of {one.sequence_length} tokens a step, "
        f"{len(seeds)} seeds. Each optimizer uses the best of the same learning rates, found with one seed and fewer "
        "steps. Losses are held out, in nats per byte. Emulated float8 rounds as the layers of a GPU do. "
        "It uses AdamW's rate.", "",
        "| optimizer | steps | rate | final loss, mean | of each seed |", "|---|---:|---:|---:|---|", *results, "",
        f"With {PART:.0%} of the steps, Muon's final loss is {verdict}. {missed if reached is None else within}",
        "", "Curves, mean of the seeds, on fewer rows than the final losses:", "",
        "| step | AdamW | Muon | AdamW, float8 emulated |", "|---:|---:|---:|---:|", *rows,
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tuning-steps", type=int, default=200)
    parser.add_argument("--learning-rates", default="2e-3,4e-3,8e-3,16e-3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to both recipes")
    given = parser.parse_args()
    recipes, seeds = write_recipes(given.out / "recipes", given.recipe, given.steps), given.seeds.split(",")
    compared = given.out / "comparison"
    command = [sys.executable, "-m", "gecko", "compare", *map(str, recipes), "--out", str(compared)]
    command += [*given.overrides, "--seeds", given.seeds, "--learning-rates", given.learning_rates]
    subprocess.run([*command, "--tuning-steps", str(given.tuning_steps)], check=True)
    short = trained_again(given.out / "short", compared / "muon", seeds, PART)
    float8 = trained_again(given.out / "float8", compared / "adamw", seeds, precision="float8_emulated")
    asked = f"--steps {given.steps} --tuning-steps {given.tuning_steps} --learning-rates {given.learning_rates}"
    names = ["python benchmarks/optimizers.py --out runs/optimizers", asked, "--write", *given.overrides]
    lines = report(compared, short, float8, seeds, " ".join(names))
    publish("optimizers.md", lines, given.write)


if __name__ == "__main__":
    main()
