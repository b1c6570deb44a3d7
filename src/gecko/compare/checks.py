"""What must be alike in all recipes of a comparison."""

from __future__ import annotations

from collections.abc import Mapping

from gecko.baselines import ModelConfig, meta_model
from gecko.train import Run
from gecko.train.fields import flatten

MAY_DIFFER = (
    "model", "optimizer.learning_rate", "output", "seed", "recipe", "overrides", "sample", "wandb", "checkpoint",
    "activation_checkpointing", "hang_minutes", "profile", "minutes",
)  # fmt: skip
"""Fields of a run that a comparison sets itself, that are compared, or that change nothing of what is learnt."""


def common_settings(run: Run) -> dict[str, object]:
    """The fields that all runs of a comparison share, with dotted names."""
    fields = flatten(run.to_dict())
    return {name: value for name, value in fields.items() if not name.startswith(tuple(f"{it}." for it in MAY_DIFFER))
            and name not in MAY_DIFFER}  # fmt: skip


def check_same_training(runs: Mapping[str, Run]) -> None:
    """ValueError that names the settings in which runs differ, or where a run has no number of steps."""
    settings = {name: common_settings(run) for name, run in runs.items()}
    different = {
        key: {name: found[key] for name, found in settings.items()}
        for key in next(iter(settings.values()))
        if any(found[key] != next(iter(settings.values()))[key] for found in settings.values())
    }
    if different:
        places = "; ".join(
            f"{key} (" + ", ".join(f"{name}: {value}" for name, value in values.items()) + ")"
            for key, values in different.items()
        )
        key, values = next(iter(different.items()))
        raise ValueError(
            f"recipes that are compared must train alike but for their models and learning rates; they differ in "
            f"{places}. Set each for all of them, for example {key}={next(iter(values.values()))}."
        )
    if any(run.steps is None for run in runs.values()):
        raise ValueError(
            "a comparison gives every model the same tokens, so the number of steps must be set, as steps=1000; "
            f"got minutes={next(iter(runs.values())).minutes:g}."
        )


def count_parameters(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def check_parameters(parameters: Mapping[str, int], tolerance: float) -> None:
    """ValueError where the largest model has more than ``1 + tolerance`` times the parameters of the smallest."""
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
