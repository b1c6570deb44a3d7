"""Which runs a comparison is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gecko.compare.checks import check_parameters, check_same_training, count_parameters
from gecko.recipes import apply_overrides, get_recipe
from gecko.train import Run


@dataclass(frozen=True)
class Tuning:
    """Short runs before the others, the same for every recipe."""

    learning_rates: tuple[float, ...]
    steps: int
    """Of each of them."""

    def __post_init__(self) -> None:
        rates = self.learning_rates
        if len(set(rates)) < max(2, len(rates)) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(
                "tuning takes at least two different finite learning rates above 0, as --learning-rates 2e-3,4e-3; got "
                f"{', '.join(map(str, rates)) or 'none'}. For one rate set optimizer.learning_rate=4e-3."
            )
        if self.steps < 1:
            raise ValueError(f"--tuning-steps must be at least 1; got {self.steps}.")


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    recipe: str
    name: str
    """Of its folder, in that of its recipe: ``seed-0``, ``tuning-4e-3``."""
    run: Run

    @property
    def label(self) -> str:
        return f"{self.recipe} {self.name}"


@dataclass(frozen=True)
class Plan:
    folder: Path
    recipes: Mapping[str, Run]
    """By name, in the order given; the first is what the others are compared with."""
    parameters: Mapping[str, int]
    """Of each recipe's model."""
    seeds: tuple[int, ...]
    tuning: Tuning | None
    """None: every recipe has its own learning rate."""

    @classmethod
    def of(
        cls,
        recipes: Sequence[str],
        overrides: Sequence[str],
        folder: Path,
        *,
        seeds: Sequence[int] = (0,),
        tuning: Tuning | None = None,
        tolerance: float = 0.02,
    ) -> Plan:
        """The plan for recipes by name or ``recipe.json``; ``overrides`` (``key=value``) apply to all of them.

        Raises:
            ValueError: recipes that train differently or whose models differ in size by more than ``tolerance``, a
                recipe or seed given twice, an override that does not fit.
            FileNotFoundError: a ``recipe.json`` is missing.
        """
        _check_overrides(overrides)
        if len(set(seeds)) < max(1, len(seeds)) or min(seeds, default=0) < 0:
            raise ValueError(f"--seeds must be different whole numbers of at least 0, as 0,1,2; got {list(seeds)}.")
        runs = {name: apply_overrides(run, overrides) for name, run in _named(recipes).items()}
        check_same_training(runs)
        parameters = {name: count_parameters(run.model) for name, run in runs.items()}
        check_parameters(parameters, tolerance)
        return cls(folder, runs, parameters, tuple(seeds), tuning)

    def tuning_runs(self) -> list[Planned]:
        """Rate by rate, over recipes; with the first seed. None without tuning."""
        if self.tuning is None:
            return []
        return [
            self._planned(recipe, f"tuning-{rate_name(rate)}", rate, self.seeds[0], [f"steps={self.tuning.steps}"])
            for rate in self.tuning.learning_rates
            for recipe in self.recipes
        ]

    def main_runs(self, rates: Mapping[str, float]) -> list[Planned]:
        """Seed by seed, over the recipes in ``rates``, so that a comparison cut short has compared all of them."""
        return [
            self._planned(recipe, f"seed-{seed}", rates[recipe], seed, [])
            for seed in self.seeds
            for recipe in self.recipes
            if recipe in rates
        ]

    def _planned(self, recipe: str, name: str, rate: float, seed: int, changes: Sequence[str]) -> Planned:
        output = self.folder / recipe / name
        settings = [f"optimizer.learning_rate={rate_name(rate)}", f"seed={seed}", f"output={output}"]
        return Planned(recipe, name, apply_overrides(self.recipes[recipe], [*changes, *settings]))


def rate_name(rate: float) -> str:
    """A learning rate as ``4e-3``; exactly, so that ``float`` gives it back."""
    digits = next(text for text in (f"{rate:.{places}e}" for places in range(17)) if float(text) == rate)
    mantissa, exponent = digits.split("e")
    return f"{mantissa}e{int(exponent)}"


def _named(recipes: Sequence[str]) -> dict[str, Run]:
    """Runs by the recipe's name, or by where its file is: a ``recipe.json`` is named after its folder."""
    found: dict[str, Run] = {}
    for spec in recipes:
        path = Path(spec).expanduser()
        run = get_recipe(spec)
        name = (
            run.recipe if path.suffix != ".json" else path.stem if path.stem != "recipe" else path.resolve().parent.name
        )
        if name in found:
            raise ValueError(f"recipes must have different names; got {name} twice. Rename the file, or its folder.")
        found[name] = run
    if len(found) < 2:
        raise ValueError(f"a comparison takes at least two recipes; got {', '.join(found) or 'none'}.")
    return found


def _check_overrides(overrides: Sequence[str]) -> None:
    options = {"output": "--out", "seed": "--seeds"}
    for key in (override.partition("=")[0] for override in overrides):
        if key in options:
            raise ValueError(f"{key} is different for every run of a comparison; set {options[key]} in its place.")
