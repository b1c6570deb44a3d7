"""The short tasks of the paper's Table 1 with lm-evaluation-harness, from the hub or from local files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gecko.config import unknown_name
from gecko.eval.intervals import bootstrap_mean, wilson
from gecko.eval.results import Results, Score
from gecko.eval.scored_model import ScoredModel
from gecko.extras import require

SUBJECT = "mmlu_"
SPLITS = {"train": "train", "val": "validation", "validation": "validation", "dev": "dev", "test": "test"}
"""How a file's name ends, and the split's name."""
SUFFIXES = (".arrow", ".jsonl")


@dataclass(frozen=True)
class AcademicTask:
    """One of Table 1. ``metric`` is the table's; others that the harness gives are reported beside it."""

    shots: int
    metric: str
    folder: str
    """Where the harness keeps its definition."""


TASKS: Mapping[str, AcademicTask] = {
    "mmlu": AcademicTask(5, "acc", "mmlu/default"),
    "boolq": AcademicTask(0, "acc", "super_glue/boolq"),
    "hellaswag": AcademicTask(0, "acc_norm", "hellaswag"),
    "piqa": AcademicTask(0, "acc", "piqa"),
    "social_iqa": AcademicTask(0, "acc", "siqa"),
    "winogrande": AcademicTask(0, "acc", "winogrande"),
    "arc_easy": AcademicTask(0, "acc", "arc"),
    "arc_challenge": AcademicTask(0, "acc", "arc"),
    "nq_open": AcademicTask(5, "exact_match", "nq_open"),
    "triviaqa": AcademicTask(5, "exact_match", "triviaqa"),
}


def academic(
    model: ScoredModel[Any], tasks: Sequence[str], *, data: Path | None = None, limit: int | None = None, seed: int = 0
) -> Results:  # fmt: skip
    """Evaluate tasks with the table's shots and metrics.

    Args:
        tasks: names of ``TASKS``; none: all, or with ``data`` all that it holds.
        data: a folder of files ``TASK_SPLIT.arrow`` or ``.jsonl`` (``piqa_val.arrow``, ``mmlu_anatomy_test.arrow``),
            in the hub's own columns; None: the hub.
        limit: only so many first items of every task.
        seed: of the shots drawn from a split, and of the bootstrap.

    Raises:
        ValueError, FileNotFoundError: unknown tasks, or tasks asked for that ``data`` does not hold.
    """
    for task in tasks:
        if task not in TASKS:
            raise ValueError(unknown_name("task", task, TASKS))
    require("lm_eval", "eval")
    # It warns of every setting that is not the default.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    specs, notes = _from_hub(tasks or list(TASKS)) if data is None else _from_files(data, tasks)
    loaded = _load(specs, seed)
    ran = _evaluate(model, loaded, limit)
    scores = [score for name in ran["samples"] for score in _scores(name, ran["samples"][name], seed)]
    scores += _all_subjects(ran["samples"])
    if limit is not None:
        notes.append(f"at most the first {limit} items of every task")
    settings = {"tasks": list(ran["samples"]), "data": None if data is None else data.name, "limit": limit}
    shots = {name: task.config.num_fewshot for name, task in loaded.items()}
    return Results("academic", scores, settings | {"shots": shots}, seed, notes, {"versions": ran["versions"]})


def _from_hub(tasks: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    return [{"task": name, "num_fewshot": TASKS[name].shots} for name in tasks], []


def _from_files(folder: Path, tasks: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The harness's tasks with their splits taken from files."""
    found = _local_splits(folder)
    by_task: dict[str, list[str]] = {}
    for name in found:
        by_task.setdefault("mmlu" if name.startswith(SUBJECT) else name, []).append(name)
    missing = [task for task in TASKS if task not in by_task]
    asked_in_vain = [task for task in tasks if task in missing]
    if asked_in_vain:
        raise FileNotFoundError(
            f"{folder} must hold the tasks asked for; it has no file of {', '.join(asked_in_vain)}, such as "
            f"{asked_in_vain[0]}_val.arrow. It holds {', '.join(by_task) or 'none of the tasks'}."
        )
    chosen = [task for task in TASKS if task in by_task and (not tasks or task in tasks)]
    if not chosen:
        raise FileNotFoundError(f"{folder} must hold files such as piqa_val.arrow; it holds none of the tasks.")
    specs: list[dict[str, Any]] = []
    notes: list[str] = []
    for task in chosen:
        for name in by_task[task]:
            specs.append(_local_task(name, TASKS[task].shots, found[name], notes))
    notes += [f"{task} skipped: {folder.name} has no file of it" for task in missing if not tasks]
    if "mmlu" in chosen:
        notes.append(f"mmlu is of {len(by_task['mmlu'])} subjects, those at hand")
    return specs, notes


def _local_splits(folder: Path) -> dict[str, dict[str, Path]]:
    """Files by task and split."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--data must be a folder of files such as piqa_val.arrow; there is no folder {folder}."
        )
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        name, _, split = path.stem.rpartition("_")
        if path.suffix in SUFFIXES and split in SPLITS and (name in TASKS or name.startswith(SUBJECT)):
            found.setdefault(name, {})[SPLITS[split]] = path
    return found


def _local_task(name: str, shots: int, splits: Mapping[str, Path], notes: list[str]) -> dict[str, Any]:
    """Evaluated is the validation split, else the test's. Shots are of dev, else train, else of other items there."""
    evaluated = next((split for split in ("validation", "test") if split in splits), None)
    if evaluated is None:
        raise FileNotFoundError(f"{name} must have a file {name}_val or {name}_test; there is only {list(splits)}.")
    source = next((split for split in ("dev", "train") if split in splits), evaluated)
    if shots and source == evaluated:
        notes.append(f"{name}: its {shots} shots are other items of the {evaluated} split; there is no other file")
    # The harness keeps an item out of its own shots only where the split of shots is the one it calls test.
    return {
        "task": name, "num_fewshot": shots, "custom_dataset": lambda **_: _open(splits), "training_split": None,
        "validation_split": None, "test_split": evaluated, "fewshot_split": source,
    }  # fmt: skip


def _open(splits: Mapping[str, Path]) -> dict[str, Any]:
    datasets = require("datasets", "eval").Dataset
    readers = {".arrow": datasets.from_file, ".jsonl": datasets.from_json}
    return {split: readers[path.suffix](str(path)) for split, path in splits.items()}


def _load(specs: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """The harness's tasks by name. To look for definitions in the folders of these tasks only takes half a second."""
    tasks = require("lm_eval.tasks", "eval")
    root = Path(str(tasks.__file__)).parent
    folders = [root / folder for folder in dict.fromkeys(task.folder for task in TASKS.values())]
    manager = tasks.TaskManager(include_defaults=False, include_path=folders)
    for spec in specs:
        if spec["task"] not in manager.all_tasks:
            raise ValueError(unknown_name("task", spec["task"], manager.all_subtasks))
    loaded = manager.load({"group": "table-1", "task": [dict(spec) for spec in specs]})["tasks"]
    for task in loaded.values():
        task.set_fewshot_seed(seed)
    return loaded


def _evaluate(model: ScoredModel[Any], tasks: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    from gecko.eval.harness import HarnessModel

    evaluator = require("lm_eval.evaluator", "eval")
    return evaluator.evaluate(HarnessModel(model), {"tasks": dict(tasks)}, limit=limit, bootstrap_iters=0)


def _scores(name: str, samples: Sequence[Mapping[str, Any]], seed: int) -> list[Score]:
    """Every metric of a task; the table's first."""
    table = TASKS["mmlu" if name.startswith(SUBJECT) else name].metric
    metrics = sorted(samples[0]["metrics"], key=lambda metric: metric != table)
    return [_score(name, metric, [float(sample[metric]) for sample in samples], seed) for metric in metrics]


def _score(name: str, metric: str, values: Sequence[float], seed: int) -> Score:
    yes_or_no = set(values) <= {0.0, 1.0}
    interval = wilson(int(sum(values)), len(values)) if yes_or_no else bootstrap_mean(np.array(values), "items", seed)
    return Score(metric, sum(values) / len(values), len(values), "items", interval, {"task": name})


def _all_subjects(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Score]:
    """MMLU over the items of all its subjects."""
    values = [float(item["acc"]) for name, items in samples.items() if name.startswith(SUBJECT) for item in items]
    return [_score("mmlu", "acc", values, 0)] if values else []
