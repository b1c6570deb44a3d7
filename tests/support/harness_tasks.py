"""Small tasks for lm-evaluation-harness, whose data the test writes, and what the harness gets for each item."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": f"what {'ü is ' * n}it", "choices": ["no", "yes, it is", "é"], "text": f"some text {n} " * (n + 1)}
    for n in range(4)
]
COMMON: dict[str, Any] = {"dataset_path": "json", "test_split": "test", "doc_to_text": "Q: {{question}}\nA:"}
CHOICES, TEXTS, ANSWERS = "small_choices", "small_texts", "small_answers"
TASKS: dict[str, dict[str, Any]] = {
    CHOICES: {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 1},
    TEXTS: {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    ANSWERS: {
        "output_type": "generate_until", "doc_to_target": "x",
        "generation_kwargs": {"until": ["q"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0},
    },
}  # fmt: skip
METRICS = {CHOICES: "acc", TEXTS: "word_perplexity", ANSWERS: "exact_match"}


@dataclass(frozen=True)
class Evaluated:
    """What the harness found on a task."""

    responses: list[Any]
    """Of each item, in order."""
    metric: float


def write_tasks(folder: Path) -> TaskManager:
    """Write the tasks into a folder and return the harness's manager of them."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(folder / "rows.jsonl")}}
        more = {"task": name, "dataset_kwargs": files, "metric_list": [{"metric": METRICS[name]}]}
        (folder / f"{name}.yaml").write_text(json.dumps({**COMMON, **task, **more}))
    return TaskManager(include_defaults=False, include_path=str(folder))


def evaluate(
    task: str, tasks: TaskManager, model: Any, arguments: Mapping[str, Any] | None = None, batch: int = 1
) -> Evaluated:
    """Run a task on a model of the harness, or on the kind of model named, with its arguments."""
    ran = lm_eval.simple_evaluate(
        model=model,
        model_args=dict(arguments or {}),
        tasks=[task],
        task_manager=tasks,
        batch_size=batch,
        bootstrap_iters=0,
    )
    samples = sorted(ran["samples"][task], key=lambda sample: sample["doc_id"])
    return Evaluated([sample["resps"] for sample in samples], ran["results"][task][f"{METRICS[task]},none"])
