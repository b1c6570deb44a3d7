"""Muon beside AdamW on ``tiny``: curves of several seeds, each optimizer at the best of the same learning rates.

    python benchmarks/optimizers.py --out runs/optimizers             # hours on a CPU; the same command continues
    python benchmarks/optimizers.py --out runs/optimizers --steps 20 --tuning-steps 10 --seeds 0    # a trial

It writes one recipe per optimizer and runs ``gecko compare``, whose page has the curves and the differences. Then it
prints the first held-out loss of Muon that is as low as AdamW's last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gecko.recipes import apply_overrides, get_recipe
from gecko.train.metrics import METRICS, read_metrics

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tuning-steps", type=int, default=200)
    parser.add_argument("--learning-rates", default="2e-3,4e-3,8e-3,16e-3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to both recipes")
    given = parser.parse_args()
    recipes = write_recipes(given.out / "recipes", given.recipe, given.steps)
    compared = given.out / "comparison"
    command = [sys.executable, "-m", "gecko", "compare", *map(str, recipes), "--out", str(compared)]
    command += [*given.overrides, "--seeds", given.seeds, "--learning-rates", given.learning_rates]
    subprocess.run([*command, "--tuning-steps", str(given.tuning_steps)], check=True)
    adamw, muon = (held_out(compared / name, given.seeds.split(",")) for name in OPTIMIZERS)
    last = adamw[max(adamw)]
    reached = next((step for step, loss in muon.items() if loss <= last), None)
    print(f"AdamW ends at {last:.4f} nats per byte after {max(adamw)} steps, Muon at {muon[max(muon)]:.4f}")
    print("Muon does not reach it" if reached is None else f"Muon reaches it after {reached} steps")


if __name__ == "__main__":
    main()
