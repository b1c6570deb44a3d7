"""The plan of a comparison: which settings its recipes share, its runs, and their folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from gecko.data import is_shard_folder
from gecko.data.sources import find_sources
from gecko.data.training_data import parse_source
from gecko.io.files import read_object, whole_file
from gecko.models import meta_model
from gecko.recipes import apply_overrides, get_recipe
from gecko.train import Run
from gecko.train.evaluate import Evaluation, with_numbers
from gecko.train.finish import RESULTS
from gecko.train.run import has_role
from gecko.train.settings import Role, flatten

PLANNED, LOG, LOCK = "planned.json", "log.txt", ".lock"
"""Files in the folders of a comparison and its runs. Training has another lock in a run's folder."""
_MOVABLE = ("output", "recipe", "overrides", "sample.prompt")
"""Fields that may change between calls for the same comparison."""
_OPTIONS = {"output": "--out", "seed": "--seeds"}


def _common_settings(run: Run) -> dict[str, object]:
    return {name: value for name, value in flatten(run.to_dict()).items() if not has_role(name, Role.FREE)}


def _check_same_training(runs: Mapping[str, Run]) -> None:
    """Raise an error if runs differ in a setting that must be equal, have no number of steps, or a source is no file.

    Runs find data sets of the hub.
    """
    settings = {name: _common_settings(run) for name, run in runs.items()}
    first = next(iter(settings.values()))
    different = [key for key in first if any(found[key] != first[key] for found in settings.values())]
    if different:
        places = "; ".join(
            f"{key} (" + ", ".join(f"{name}: {found[key]}" for name, found in settings.items()) + ")"
            for key in different
        )
        raise ValueError(
            f"recipes that are compared must train alike except for models, optimizers and learning rates; they differ "
            f"in {places}. Set each for all of them, for example {different[0]}={first[different[0]]}."
        )
    if any(run.steps is None for run in runs.values()):
        raise ValueError(
            "a comparison gives every model the same tokens, so the number of steps must be set, such as steps=1000; "
            f"got minutes={next(iter(runs.values())).minutes:g}."
        )
    for data in {run.data for run in runs.values()}:
        mixture = [parse_source(item)[0] for item in data.sources] or [data.source]
        for source in (*mixture, *([] if data.validation is None else [data.validation])):
            if not is_shard_folder(source):
                find_sources(source)


def _check_parameters(parameters: Mapping[str, int], tolerance: float) -> None:
    """Raise ValueError if the largest model has more than ``1 + tolerance`` times the parameters of the smallest."""
    if not tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0; got {tolerance}. Try 0.02.")
    excess = max(parameters.values()) / min(parameters.values()) - 1
    if excess > tolerance:
        counts = ", ".join(f"{name}: {count:,}" for name, count in parameters.items())
        raise ValueError(
            f"models that are compared must have equal numbers of parameters, within {100 * tolerance:g} %; the "
            f"largest has {100 * excess:.1f} % more than the smallest ({counts}). Change model.* in a recipe.json, or "
            "allow more with --tolerance."
        )


@dataclass(frozen=True)
class Tuning:
    """Short runs of every recipe that choose its learning rate."""

    learning_rates: tuple[float, ...]
    steps: int
    """Steps per run."""

    def __post_init__(self) -> None:
        rates = self.learning_rates
        if len(set(rates)) < max(2, len(rates)) or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(
                "tuning takes at least two different finite learning rates above 0, as --learning-rates 2e-3,4e-3; got "
                f"{', '.join(map(str, rates)) or 'none'}. For one rate set optimizer.learning_rate=4e-3."
            )
        if self.steps < 1:
            raise ValueError(f"--tuning-steps must be at least 1; got {self.steps}.")


class Planned(NamedTuple):
    """One run of a comparison; ``name`` is that of its folder in the recipe's folder: ``seed-0``, ``tuning-4e-3``."""

    recipe: str
    name: str
    run: Run

    @property
    def label(self) -> str:
        return f"{self.recipe} {self.name}"


@dataclass(frozen=True)
class ComparisonPlan:
    """Recipes, seeds and tuning of a comparison."""

    folder: Path
    recipes: Mapping[str, Run]
    """Recipes by name, in the order given. The others are compared with the first."""
    parameters: Mapping[str, int]
    """Number of parameters of each recipe's model."""
    seeds: tuple[int, ...]
    tuning: Tuning | None
    """None if every recipe keeps its own learning rate."""

    @classmethod
    def of(
        cls, recipes: Sequence[str], overrides: Sequence[str], folder: Path, *, seeds: Sequence[int] = (0,),
        tuning: Tuning | None = None, tolerance: float = 0.02,
    ) -> ComparisonPlan:  # fmt: skip
        """Plan a comparison of recipes.

        Args:
            recipes: names, or paths of ``recipe.json`` files.
            overrides: changes ``key=value`` to all recipes. With ``key=a|b``, every recipe is compared with each value.
            folder: folder of the comparison.

        Raises:
            ValueError: recipes train differently, their models differ in size by more than ``tolerance``, a recipe or
                seed is given twice, or an override does not fit.
            FileNotFoundError: a ``recipe.json`` does not exist.
        """
        for key in (override.partition("=")[0] for override in overrides):
            if key in _OPTIONS:
                raise ValueError(f"{key} is different for every run of a comparison; set {_OPTIONS[key]} in its place.")
        if len(set(seeds)) < max(1, len(seeds)) or min(seeds, default=0) < 0:
            raise ValueError(f"--seeds must be different whole numbers of at least 0, as 0,1,2; got {list(seeds)}.")
        runs = _variants(_named(recipes), overrides, tuned=tuning is not None)
        _check_same_training(runs)
        models = {name: meta_model(run.model) for name, run in runs.items()}
        parameters = {name: sum(x.numel() for x in model.parameters()) for name, model in models.items()}
        _check_parameters(parameters, tolerance)
        return cls(folder, runs, parameters, tuple(seeds), tuning)

    @property
    def settings(self) -> dict[str, object]:
        """Fields that all runs share, with dotted names."""
        return _common_settings(next(iter(self.recipes.values())))

    def tuning_runs(self) -> list[Planned]:
        """Return the tuning runs, with the first seed, ordered by rate and recipe; empty without tuning."""
        if self.tuning is None:
            return []
        return [
            self._planned(recipe, f"tuning-{rate_name(rate)}", rate, self.seeds[0], [f"steps={self.tuning.steps}"])
            for rate in self.tuning.learning_rates for recipe in self.recipes
        ]  # fmt: skip

    def main_runs(self, rates: Mapping[str, float]) -> list[Planned]:
        """Return the runs of the recipes in ``rates``, ordered by seed: a partial comparison has all recipes."""
        return [
            self._planned(recipe, f"seed-{seed}", rates[recipe], seed, [])
            for seed in self.seeds for recipe in self.recipes if recipe in rates
        ]  # fmt: skip

    def _planned(self, recipe: str, name: str, rate: float, seed: int, changes: Sequence[str]) -> Planned:
        output = self.folder / recipe / name
        settings = [f"optimizer.learning_rate={rate_name(rate)}", f"seed={seed}", f"output={output}"]
        return Planned(recipe, name, apply_overrides(self.recipes[recipe], [*changes, *settings]))


def rate_name(rate: float) -> str:
    """Format a learning rate such as ``4e-3``, exactly: ``float`` returns the same number."""
    digits = next(text for text in (f"{rate:.{places}e}" for places in range(17)) if float(text) == rate)
    mantissa, exponent = digits.split("e")
    return f"{mantissa}e{int(exponent)}"


def _named(recipes: Sequence[str]) -> dict[str, Run]:
    """Return runs by name: the recipe's name, or the name of its file; a ``recipe.json`` has its folder's name."""
    found: dict[str, Run] = {}
    for spec in recipes:
        run, path = get_recipe(spec), Path(spec).expanduser()
        name = run.recipe
        if path.suffix == ".json":
            name = path.stem if path.stem != "recipe" else path.resolve().parent.name
        if name in found:
            raise ValueError(f"recipes must have different names; got {name} twice. Rename the file, or its folder.")
        found[name] = run
    return found


def _variants(recipes: Mapping[str, Run], overrides: Sequence[str], *, tuned: bool) -> dict[str, Run]:
    """Return the runs by name: every recipe with each choice of the values ``key=a|b``."""
    found: dict[str, Run] = {}
    for recipe, run in recipes.items():
        for chosen in product(*(_alternatives(run, override) for override in overrides)):
            varied = [override for override in chosen if override not in overrides]
            if tuned and any(override.startswith("optimizer.learning_rate=") for override in varied):
                raise ValueError("--learning-rates chooses each run's rate; take out optimizer.learning_rate=…|….")
            name = ",".join([*([recipe] if len(recipes) > 1 or not varied else []), *varied])
            variant = apply_overrides(run, chosen)
            same = [other for other in found if replace(found[other], overrides=()) == replace(variant, overrides=())]
            if varied and same:
                raise ValueError(f"settings that are compared must differ; {same[0]} and {name} are the same.")
            found[name] = variant
    if len(found) < 2:
        raise ValueError(
            f"a comparison takes at least two recipes; got {', '.join(found) or 'none'}. "
            "Or give two values of a setting, as 'model.chunk_size=32|64'."
        )
    return found


def _alternatives(run: Run, override: str) -> list[str]:
    """Return an override for each of its values. A text in which ``|`` stands is one value."""
    key, _, values = override.partition("=")
    try:
        apply_overrides(run, [override])
    except ValueError:
        return [f"{key}={value}" for value in values.split("|")]
    return [override]


def claim(planned: Planned) -> Path:
    """Write the file that describes the run into its folder and return its path.

    Raises:
        ValueError: the folder holds another run, or other files.
    """
    folder, path = planned.run.folder, planned.run.folder / PLANNED
    if path.is_file():
        wanted, there = flatten(planned.run.to_dict()), flatten(Run.load(path).to_dict())
        different = [
            f"{name} ({there.get(name)} there, {wanted.get(name)} now)"
            for name in {**wanted, **there} if name not in _MOVABLE and wanted.get(name) != there.get(name)
        ]  # fmt: skip
        if different:
            raise ValueError(
                f"{folder} must hold the run that is asked for; it holds one with another {', '.join(different)}. Ask "
                "for the same as before, or choose another --out."
            )
    elif any(not entry.name.startswith(".") for entry in folder.glob("*")):
        raise ValueError(
            f"{folder} must be empty or hold a run of this comparison, with a {PLANNED}; it holds something else. Move "
            "it away, or choose another --out."
        )
    with whole_file(path) as temporary:
        planned.run.save(temporary)
    return path


def evaluation_of(run: Run) -> Evaluation | None:
    """Return the evaluation of a finished run; None if the run is not finished.

    Raises:
        ValueError: the file is not the results of a run.
    """
    path = run.folder / RESULTS
    try:
        return Evaluation(**with_numbers(read_object(path, "the results of a run")))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must be the results of a run; it is not ({error}). Move it away.") from error
