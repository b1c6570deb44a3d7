"""The short tasks of the paper's Table 1 with lm-evaluation-harness, with data from the hub or from local files.

``HarnessModel`` is the adapter for ``lm_eval.simple_evaluate(model=...)``. Importing this module needs the extra
``eval``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from gecko.data import document_ids
from gecko.eval.results import Results, Score, bootstrap_mean, check_task, wilson
from gecko.eval.scored_model import ScoredModel
from gecko.runtime.process import cached_data_sets_without_network, require

_BLOCK = 1 << 16
"""Tokens per block in which texts are given to the model."""
_NEW_TOKENS = 256
"""Default number of tokens per answer, as in the harness's own models."""


class HarnessModel(TemplateLM):
    """Model for lm-evaluation-harness that never truncates texts.

    Contexts start with the document-start token. The choices of a question share one reading of the context.

    Raises:
        ValueError: a task asks for sampling, which no task of the suite does.
    """

    def __init__(self, model: ScoredModel[Any]) -> None:
        super().__init__()
        self._model = model

    @property
    def eot_token_id(self) -> int:
        return self._model.tokenizer.document_end

    @property
    def prefix_token_id(self) -> int:
        return self._model.tokenizer.document_start

    @property
    def tokenizer_name(self) -> str:
        return self._model.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._model.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return, per (texts, context, continuation), the continuation's log-probability and whether it is greedy."""
        found, read_ids, reading = [], None, None
        for (context, text), before, tokens in tqdm(requests, "scoring", disable=disable_tqdm or None):
            if not tokens:
                raise ValueError(f"a continuation must have at least one token; got {text!r} after {context[-40:]!r}.")
            ids = before if before[:1] == [self.prefix_token_id] else [self.prefix_token_id, *before]
            if ids != read_ids:
                read_ids, reading = ids, self._model.read(torch.tensor(ids, device="cpu"))
            losses, greedy = self._model.predict(reading, torch.tensor(tokens, device="cpu"))
            found.append((-float(losses.double().sum()), bool(greedy.all())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probabilities of whole texts, each token given all of the text before it."""
        found = []
        for request in tqdm(requests, "scoring", disable=disable_tqdm or None):
            pieces = self._model.losses(document_ids(self._model.tokenizer, request.args[0]).split(_BLOCK))
            found.append(-sum(float(losses.double().sum()) for losses in pieces))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        found = []
        for request in tqdm(requests, "answering", disable=disable_tqdm or None):
            context, settings = request.args
            if settings.get("do_sample"):
                raise ValueError("generation must be greedy here; the task asks for do_sample=True.")
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            limit = settings.get("max_gen_toks", _NEW_TOKENS)
            reading = self._model.read(document_ids(self._model.tokenizer, context))
            found.append(self._model.write(reading, int(limit), [stop for stop in stops if stop]))
        return found


SUBJECT = "mmlu_"
SPLITS = {"train": "train", "val": "validation", "validation": "validation", "dev": "dev", "test": "test"}
"""Split by the last part of a file's name."""
SUFFIXES = (".arrow", ".jsonl")


class AcademicTask(NamedTuple):
    """A task of Table 1, as the authors' evaluator scores it; plain accuracy is reported beside ``metric``.

    ``acc_norm`` divides the log-probability of a choice by its characters. ``acc_mutual_info`` subtracts its
    log-probability after "Answer:" alone. The paper's numbers of OLMo-1B follow OLMES, which is another protocol.
    """

    shots: int
    metric: str
    folder: str
    """Folder of the task's definition in the harness."""
    fields: tuple[str, ...]
    """Columns that the harness reads, and that no item may leave empty."""


TASKS: Mapping[str, AcademicTask] = {
    "mmlu": AcademicTask(5, "acc", "mmlu/default", ("question", "choices")),
    "boolq": AcademicTask(0, "acc_mutual_info", "super_glue/boolq", ("passage", "question")),
    "hellaswag": AcademicTask(0, "acc_norm", "hellaswag", ("activity_label", "ctx_a", "endings", "label")),
    "piqa": AcademicTask(0, "acc_norm", "piqa", ("goal", "sol1", "sol2")),
    "social_iqa": AcademicTask(
        0, "acc_norm", "siqa", ("context", "question", "answerA", "answerB", "answerC", "label")
    ),
    "winogrande": AcademicTask(0, "acc", "winogrande", ("sentence", "option1", "option2", "answer")),
    "arc_easy": AcademicTask(0, "acc_norm", "arc", ("question", "choices", "answerKey")),
    "arc_challenge": AcademicTask(0, "acc_norm", "arc", ("question", "choices", "answerKey")),
    "nq_open": AcademicTask(5, "exact_match", "nq_open", ("question", "answer")),
    "triviaqa": AcademicTask(5, "exact_match", "triviaqa", ("question", "answer.aliases")),
}


def academic(
    model: ScoredModel[Any], tasks: Sequence[str], *, data: Path | None = None, limit: int | None = None, seed: int = 0
) -> Results:  # fmt: skip
    """Evaluate tasks with the table's shots and metrics.

    Args:
        tasks: names from ``TASKS``. If empty, all tasks, or with ``data`` all tasks in that folder.
        data: folder of files ``TASK_SPLIT.arrow`` or ``.jsonl`` (``piqa_val.arrow``, ``mmlu_anatomy_test.arrow``), with
            the columns of the hub; None for the hub.
        limit: use only the first ``limit`` items of every task.
        seed: seed of the shots and of the bootstrap.

    Raises:
        ValueError: a task is unknown, a file is damaged, a field of an item is empty, or its answer is none of its
            choices.
        FileNotFoundError: ``data`` does not hold a task that is asked for.
    """
    for task in tasks:
        check_task(task, TASKS)
    require("lm_eval", "eval")
    # The harness warns about every setting that is not the default.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if data is None:
        specs = [_spec(name) for name in tasks or TASKS]
        notes = list[str]()
        try:
            with cached_data_sets_without_network("eval"):
                loaded = _load(specs, seed)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the data of {', '.join(tasks or TASKS)} must be on this machine, or the hub must be reachable; got: "
                f"{error}. With --data FOLDER, files such as piqa_val.arrow in a folder are used."
            ) from error
    else:
        specs, notes = _from_files(data, tasks)
        loaded = _load(specs, seed)
    for name, task in loaded.items():
        _check_answers(name, task, limit)
    evaluator = require("lm_eval.evaluator", "eval")
    ran = evaluator.evaluate(HarnessModel(model), {"tasks": loaded}, limit=limit, bootstrap_iters=0)
    scores, subjects = list[Score](), list[float]()
    for name, items in ran["samples"].items():
        for metric in sorted(items[0]["metrics"], key=lambda one: one != TASKS[_row(name)].metric):
            scores.append(_score(name, metric, [float(item[metric]) for item in items], seed))
        subjects += [float(item["acc"]) for item in items if name.startswith(SUBJECT)]
    if subjects:  # MMLU over the items of all subjects
        scores.append(_score("mmlu", "acc", subjects, 0))
    if limit is not None:
        notes.append(f"at most the first {limit} items of every task")
    settings = {"tasks": list(ran["samples"]), "data": None if data is None else data.name, "limit": limit}
    shots = {name: task.config.num_fewshot for name, task in loaded.items()}
    return Results("academic", scores, settings | {"shots": shots}, seed, notes, {"versions": ran["versions"]})


def _row(name: str) -> str:
    """Return the task of the table that a task of the harness belongs to."""
    return "mmlu" if name.startswith(SUBJECT) else name


def _spec(name: str, **settings: Any) -> dict[str, Any]:
    """Return the harness's settings of a task, with the table's shots and metrics; answers in words have its own."""
    shots, metric, *_ = TASKS[_row(name)]
    if metric.startswith("acc") and name != "mmlu":
        settings["metric_list"] = [{"metric": one} for one in dict.fromkeys((metric, "acc"))]
    return {"task": name, "num_fewshot": shots, **settings}


def _from_files(folder: Path, tasks: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the harness's tasks with splits from files, and notes."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--data must be a folder of files such as piqa_val.arrow; there is no folder {folder}."
        )
    found: dict[str, dict[str, Path]] = {}  # files by task and split
    by_task: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        name, _, split = path.stem.rpartition("_")
        if path.suffix not in SUFFIXES or split not in SPLITS or not (name in TASKS or name.startswith(SUBJECT)):
            continue
        if (other := found.setdefault(name, {}).setdefault(SPLITS[split], path)) != path:
            raise ValueError(f"a split must be one file; {folder} has {other.name} and {path.name}.")
    for name in found:
        by_task.setdefault(_row(name), []).append(name)
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
    notes = list[str]()
    specs = [_local_task(name, found[name], notes) for task in chosen for name in by_task[task]]
    notes += [f"{task} skipped: {folder.name} has no file of it" for task in missing if not tasks]
    if "mmlu" in chosen:
        notes.append(f"mmlu is of {len(by_task['mmlu'])} subjects, those at hand")
    return specs, notes


def _local_task(name: str, splits: Mapping[str, Path], notes: list[str]) -> dict[str, Any]:
    """Return a task on the validation or else the test split, with shots from dev, train, or else the same split."""
    evaluated = next((split for split in ("validation", "test") if split in splits), None)
    if evaluated is None:
        raise FileNotFoundError(f"{name} must have a file {name}_val or {name}_test; there is only {list(splits)}.")
    source, shots = next((split for split in ("dev", "train") if split in splits), evaluated), TASKS[_row(name)].shots
    if shots and source == evaluated:
        notes.append(f"{name}: its {shots} shots are other items of the {evaluated} split; there is no other file")
    # The harness excludes an item from its own shots only if shots are from the split that it calls the test split.
    return _spec(
        name, custom_dataset=lambda **_: _open(name, splits), training_split=None, validation_split=None,
        test_split=evaluated, fewshot_split=source,
    )  # fmt: skip


def _open(name: str, splits: Mapping[str, Path]) -> dict[str, Any]:
    datasets = require("datasets", "eval").Dataset
    readers, found = {".arrow": datasets.from_file, ".jsonl": datasets.from_json}, {}
    for split, path in splits.items():
        try:
            found[split] = readers[path.suffix](str(path))
        except (OSError, ValueError, StopIteration, require("datasets", "eval").exceptions.DatasetsError) as error:
            raise ValueError(f"{path} must hold the items of {name}; it cannot be read: {error!r:.200}.") from error
        for number, item in enumerate(found[split]):
            _check_item(f"{path}, item {number},", TASKS[_row(name)], item)
    if name == "boolq":  # the harness reads super_glue, whose answers are in "label"; google/boolq says "answer"
        found |= {
            split: data.rename_column("answer", "label") for split, data in found.items()
            if {"answer", "label"} & {*data.features} == {"answer"}
        }  # fmt: skip
    return found


def _check_item(where: str, task: AcademicTask, item: Mapping[str, Any]) -> None:
    """Raise ValueError if an item leaves a field empty that the harness would put into its prompt or its choices."""
    for field in task.fields:
        value: Any = item
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        lists = list(value.values()) if isinstance(value, Mapping) else [value]
        texts = [text for one in lists for text in (one if isinstance(one, list) else [one])]
        sizes = {len(one) for one in lists if isinstance(one, list)}
        few = field in ("choices", "endings") and min(sizes, default=0) < 2
        if not texts or not all(str(text).strip() and text is not None for text in texts) or len(sizes) > 1 or few:
            raise ValueError(f"{where} must have a whole {field}; got {value!r:.200}.")
    if task is TASKS["mmlu"] and len(item["choices"]) != 4:
        raise ValueError(f"{where} must have four choices; got {item['choices']!r:.200}.")


def _check_answers(name: str, task: Any, limit: int | None) -> None:
    """Raise ValueError if the answer of an item is none of its choices, or shots are too few: the harness would count
    the item as wrong, or stop."""
    count = task.config.num_fewshot
    shots = list(task.fewshot_docs()) if count else []
    if count and len(shots) < count + (task.config.fewshot_split == task.config.test_split):
        raise ValueError(f"{name} must have {count} shots beside an item; there are {len(shots)}.")
    items = [*islice(task.eval_docs, limit), *shots] if task.config.output_type == "multiple_choice" else []
    for number, item in enumerate(items):
        choices, answer = [], None
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            choices = task.doc_to_choice(item)
            answer = task.doc_to_text(item) if task.multiple_input else task.doc_to_target(item)
        known = range(len(choices)) if isinstance(answer, int) else choices
        if answer not in known or not all(map(str.strip, choices)):
            raise ValueError(
                f"the answer of each item of {name} must be one of its choices {choices}; that of item {number} is "
                f"{answer!r}. The columns {', '.join(task.features)} must be those of "
                f"{task.config.dataset_path} on the hub, in a split whose answers are known."
            )


def _load(specs: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Load the harness's tasks by name. Definitions are searched only in the folders of these tasks, for speed."""
    tasks, folders = require("lm_eval.tasks", "eval"), dict.fromkeys(task.folder for task in TASKS.values())
    include = [Path(str(tasks.__file__)).parent / folder for folder in folders]
    manager = tasks.TaskManager(include_defaults=False, include_path=include)
    for spec in specs:
        if spec["task"] not in manager.all_tasks:
            check_task(spec["task"], manager.all_subtasks)
    loaded: dict[str, Any] = {}
    for spec in specs:
        try:
            loaded |= manager.load({"group": "table-1", "task": [dict(spec)]})["tasks"]
        except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
            message = f"{spec['task']} cannot be evaluated with these items: {str(error) or repr(error)}"
            raise ValueError(message) from error
    for task in loaded.values():
        task.set_fewshot_seed(seed)
        task.construct_requests = partial(_requests, task.construct_requests)
    return loaded


def _requests(construct: Callable[..., list[Instance]], *arguments: Any, **options: Any) -> list[Instance]:
    """Return the harness's requests of an item, with choices without a context after "Answer:"."""
    found = construct(*arguments, **options)
    for request in found if isinstance(found, list) else []:
        context, *rest = request.arguments
        if context == "" and request.request_type == "loglikelihood":
            request.arguments = ("Answer:", f" {rest[0].lstrip()}")
    return found


def _score(name: str, metric: str, values: Sequence[float], seed: int) -> Score:
    yes_or_no = set(values) <= {0.0, 1.0}
    interval = wilson(int(sum(values)), len(values)) if yes_or_no else bootstrap_mean(np.array(values), "items", seed)
    return Score(metric, sum(values) / len(values), len(values), "items", interval, {"task": name})
