"""Long documents with questions: NarrativeQA, Qasper and QMSum, as the paper asks and scores them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from gecko.config import unknown_name
from gecko.eval.intervals import bootstrap, bootstrap_mean
from gecko.eval.results import Report, Results, Score, quiet
from gecko.eval.scored_model import ScoredModel, encode_document
from gecko.eval.scrolls_data import Question, QuestionSet
from gecko.eval.scrolls_scores import ROUGE, f1_scores, geometric_mean, rouge_scores

BETWEEN = "\n\n"
"""Between a shot and what follows; an answer ends at the first line break."""


@dataclass(frozen=True)
class ScrollsTask:
    shots: int
    metric: str
    new_tokens: int


TASKS: Mapping[str, ScrollsTask] = {
    "narrative_qa": ScrollsTask(0, "f1", 64),
    "qasper": ScrollsTask(2, "f1", 128),
    "qmsum": ScrollsTask(1, "rouge", 256),
}


def check_task(task: str) -> None:
    """ValueError for an unknown task."""
    if task not in TASKS:
        raise ValueError(unknown_name("task", task, TASKS))


def scrolls(
    model: ScoredModel[Any], task: str, data: QuestionSet, *, shots: QuestionSet | None = None,
    limit: int | None = None, new_tokens: int | None = None, seed: int = 0, report: Report = quiet,
) -> Results:  # fmt: skip
    """Answer greedily after ``{CONTEXT} Q: {QUESTION} A:``, and score as SCROLLS does.

    Shots are the same form with an answer, of other documents, the same for all questions of a document, so that a
    document is read once.

    Args:
        shots: where shots are drawn from; None: ``data`` itself.
        limit: only so many questions, the first.
        new_tokens: most tokens of an answer; None: the task's.

    Raises:
        ValueError: an unknown task, or no other document to draw shots from.
    """
    check_task(task)
    settings, asked = TASKS[task], list(data.questions if limit is None else data.questions[:limit])
    length = settings.new_tokens if new_tokens is None else new_tokens
    pool = (data if shots is None else shots).questions
    answers: list[str] = []
    for number, (document, group) in enumerate(groupby(asked, lambda question: question.document)):
        report(f"{len(answers)} of {len(asked)} questions")
        before = _shots(pool, document, settings.shots, random.Random(f"{seed} {number}"))
        answers += list(_answers(model, before + document, list(group), length))
    every = len(data.questions)
    notes = [f"only the first {len(asked)} of {every} questions"] if len(asked) < every else []
    if settings.shots and shots is None:
        notes.append("shots are of other documents of the evaluated split; no other split was given")
    empty = sum(not answer.strip() for answer in answers)
    if empty:
        notes.append(f"{empty} of {len(answers)} answers are empty, and count as 0")
    details = [{"question": q.text, "answers": q.answers, "got": got} for q, got in zip(asked, answers, strict=True)]
    scores = _score(task, answers, [question.answers for question in asked], seed)
    options = {
        "task": task, "data": data.name, "limit": limit, "shots": settings.shots,
        "shots_data": None if shots is None else shots.name, "new_tokens": length,
    }  # fmt: skip
    return Results("scrolls", scores, options, seed, notes, {"answers": details})


def prompt_end(question: str) -> str:
    """What follows the context."""
    return f" Q: {question} A:"


def _shots(pool: Sequence[Question], document: str, count: int, rng: random.Random) -> str:
    others = [question for question in pool if question.document != document]
    if len(others) < count:
        raise ValueError(
            f"{count} shots need as many questions of other documents; got {len(others)}. Give a file of other "
            "documents by --shots-data."
        )
    chosen = rng.sample(others, count)
    return "".join(f"{shot.document}{prompt_end(shot.text)} {shot.answers[0]}{BETWEEN}" for shot in chosen)


def _answers(
    model: ScoredModel[Any], context: str, questions: Sequence[Question], new_tokens: int
) -> Iterator[str]:  # fmt: skip
    """Reads the context once, and goes on from there for every question."""
    reading = model.read(encode_document(model.tokenizer, context))
    for question in questions:
        tokens = torch.from_numpy(model.tokenizer.encode(prompt_end(question.text)))
        yield model.write(model.read(tokens, reading), new_tokens, ["\n"])


def _score(task: str, answers: Sequence[str], references: Sequence[Sequence[str]], seed: int) -> list[Score]:
    where, n = {"task": task}, len(answers)
    if TASKS[task].metric == "f1":
        values = f1_scores(answers, references)
        return [Score("F1", float(values.mean()), n, "questions", bootstrap_mean(values, "questions", seed), where)]
    rouge = rouge_scores(answers, references)
    mean = float(geometric_mean(*rouge))
    spread = bootstrap(list(rouge), geometric_mean, "questions", seed)
    scores = [Score("geometric mean of ROUGE-1, -2, -L", mean, n, "questions", spread, where)]
    for name, values in zip(ROUGE, rouge, strict=True):
        spread = bootstrap_mean(values, "questions", seed)
        scores.append(Score(name, float(values.mean()), n, "questions", spread, where))
    return scores
