"""Questions about long documents from SCROLLS: NarrativeQA, Qasper and QMSum, prompted and scored as in the paper.

Answers are scored by word F1, or by the geometric mean of ROUGE-1, -2 and -L, in percent. Questions are read from
SCROLLS' records, in files or on the hub, or from QMSum's own files of meetings.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gecko.data import document_ids
from gecko.data.readers import check_unicode, read_records
from gecko.eval.results import Report, Results, Score, Values, bootstrap, bootstrap_mean, check_task, quiet
from gecko.eval.scored_model import ScoredModel
from gecko.runtime.process import cached_data_sets_without_network, require

HUB = "zip://{task}/{split}.jsonl::https://huggingface.co/datasets/{name}/resolve/main/{task}.zip"
"""Address of SCROLLS on the hub: one archive per task with a folder of JSON Lines."""


class Question(NamedTuple):
    """A question about a document with its reference answers."""

    document: str
    text: str
    answers: tuple[str, ...]


class QuestionSet(NamedTuple):
    """Questions of one file, or of one data set on the hub, and its name; those about one document are consecutive."""

    name: str
    questions: Sequence[Question]


def load_questions(source: str, task: str, split: str) -> QuestionSet:
    """Load the questions of a file or of a data set on the hub.

    Args:
        source: JSON Lines file of SCROLLS' records (id, input, output) or of QMSum's meetings, or the name of a data
            set on the hub with the layout of ``tau/scrolls``.
        task, split: task and split of a data set on the hub.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a record is of another kind, or there are no questions.
    """
    path = Path(source).expanduser()
    if path.is_file():
        name, questions = path.name, _of_records(read_records(path))
    elif path.suffix or path.is_absolute() or source.count("/") != 1:
        raise FileNotFoundError(f"--data must be a JSON Lines file, or a name on the hub; there is no file {path}.")
    else:
        name, rows = source, _from_hub(source, task, split)
        questions = _of_records((f"{source}, row {row},", dict(record)) for row, record in enumerate(rows))
    if not questions:
        raise ValueError(f"{source} must hold at least one question with an answer; it holds none.")
    first = {question.document: place for place, question in reversed(list(enumerate(questions)))}
    return QuestionSet(name, sorted(questions, key=lambda question: first[question.document]))


def _from_hub(name: str, task: str, split: str) -> Any:
    datasets, address = require("datasets", "eval"), HUB.format(name=name, task=task, split=split)
    try:
        with cached_data_sets_without_network("eval"):
            return datasets.load_dataset("json", data_files={split: address}, split=split)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"--data must be a JSON Lines file, or a data set on the hub that can be fetched; got {name!r}: {error}"
        ) from error


def _of_records(records: Iterator[tuple[str, dict[str, Any]]]) -> list[Question]:
    """Return the questions of records. SCROLLS repeats an item for each of its answers, with the same id."""
    several: dict[str, Question] = {}
    for where, record in records:
        if "meeting_transcripts" in record:
            several |= {f"{where} {number}": one for number, one in enumerate(_of_meeting(where, record))}
            continue
        missing = [name for name in ("id", "input", "output") if not isinstance(record.get(name), str)]
        if missing:
            raise ValueError(
                f"{where} must be a record of SCROLLS (id, input, output) or a meeting of QMSum; it lacks {missing} "
                f"among {sorted(record)[:8]}. Only splits with answers can be scored."
            )
        question, separator, document = record["input"].partition("\n\n")
        if not separator:
            raise ValueError(f"{where} must have question and document in 'input', an empty line between; it has none.")
        asked = Question(document.strip(), question.strip(), ())
        first = several.setdefault(record["id"], asked)
        if first[:2] != asked[:2]:
            raise ValueError(f"{where} must have an id of its own; another question has its id {record['id']!r}.")
        several[record["id"]] = first._replace(answers=(*first.answers, record["output"]))
    for name, one in several.items():
        check_unicode("".join((one.document, one.text, *one.answers)), f"question {name!r}")
        if not any(map(str.strip, one.answers)):
            raise ValueError(f"question {name!r} must have an answer to compare with; it has none. Leave it out.")
    return list(several.values())


def _of_meeting(where: str, record: Mapping[str, Any]) -> list[Question]:
    """Return the general and the specific queries of a meeting, each with the whole transcript as its document."""
    try:
        document = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"])
        queries = *record.get("general_query_list", []), *record.get("specific_query_list", [])
        return [Question(document, item["query"].strip(), (item["answer"].strip(),)) for item in queries]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} must be a meeting of QMSum; a field is missing or of another type: {error}."
        ) from error


ROUGE = ("rouge1", "rouge2", "rougeL")


def f1_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """Return (items,): the word F1 of prediction and best reference, without case, punctuation and articles.

    Raises:
        ValueError: an item has no reference.
    """
    _check(predictions, references)

    def words(text: str) -> list[str]:
        text = "".join(character for character in text.lower() if character not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    def f1(got: list[str], wanted: list[str]) -> float:
        common = sum((Counter(got) & Counter(wanted)).values())
        return 2 * common / (len(got) + len(wanted)) if common else 0.0

    pairs = zip(predictions, references, strict=True)
    return np.array([100 * max(f1(words(prediction), words(one)) for one in several) for prediction, several in pairs])


def rouge_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """Return (3, items): F-measures of ROUGE-1, -2 and -L without stemming, each for the best of an item's references.

    Raises:
        ValueError: an item has no reference.
    """
    _check(predictions, references)
    scorer = require("rouge_score.rouge_scorer", "eval").RougeScorer(list(ROUGE), use_stemmer=False)
    found = []
    for prediction, several in zip(predictions, references, strict=True):
        scores = [scorer.score(one.strip(), prediction.strip()) for one in several]
        found.append([100 * max(score[name].fmeasure for score in scores) for name in ROUGE])
    return np.array(found).T


def geometric_mean(rouge1: Values, rouge2: Values, rouge_l: Values, axis: int = -1) -> Values:
    """Return the cube root of the product of the three means over items."""
    return np.cbrt(rouge1.mean(axis) * rouge2.mean(axis) * rouge_l.mean(axis))


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"every prediction needs its references; got {len(predictions)} and {len(references)}.")
    for place, several in enumerate(references):
        if not any(one.strip() for one in several):
            raise ValueError(f"item {place} must have an answer to compare with; it has none. Leave the item out.")


ASKED, BETWEEN = " Q: {} A:", "\n\n"
"""The question after a document, and the text between two examples. An answer ends at the first line break."""


class ScrollsTask(NamedTuple):
    """A task of the paper."""

    shots: int
    metric: str
    new_tokens: int


TASKS: Mapping[str, ScrollsTask] = {
    "narrative_qa": ScrollsTask(0, "f1", 64),
    "qasper": ScrollsTask(2, "f1", 128),
    "qmsum": ScrollsTask(1, "rouge", 256),
}


def scrolls(
    model: ScoredModel[Any], task: str, data: QuestionSet, *, shots: QuestionSet | None = None,
    limit: int | None = None, new_tokens: int | None = None, seed: int = 0, report: Report = quiet,
) -> Results:  # fmt: skip
    """Generate greedy answers after ``{CONTEXT} Q: {QUESTION} A:`` and score them as SCROLLS does.

    Shots have the same form and an answer, and are from other documents. All questions about a document have the same
    shots, so that the document is read once.

    Args:
        shots: questions from which shots are drawn; None for ``data``.
        limit: use only the first ``limit`` questions.
        new_tokens: largest number of tokens per answer; None for the task's.

    Raises:
        ValueError: the task is unknown, or there is no other document to draw shots from.
    """
    check_task(task, TASKS)
    settings, asked = TASKS[task], list(data.questions if limit is None else data.questions[:limit])
    length = settings.new_tokens if new_tokens is None else new_tokens
    pool = (data if shots is None else shots).questions
    answers: list[str] = []
    for number, (document, group) in enumerate(groupby(asked, lambda question: question.document)):
        report(f"{len(answers)} of {len(asked)} questions")
        before = _shots(pool, document, settings.shots, random.Random(f"{seed} {number}"))
        context = model.read(document_ids(model.tokenizer, before + document))
        for question in group:
            end = torch.from_numpy(model.tokenizer.encode(ASKED.format(question.text)))
            answers.append(model.write(model.read(end, context), length, ["\n"]))
    every, notes = len(data.questions), list[str]()
    if len(asked) < every:
        notes.append(f"only the first {len(asked)} of {every} questions")
    if settings.shots and shots is None:
        notes.append("shots are of other documents of the evaluated split; no other split was given")
    if empty := sum(not answer.strip() for answer in answers):
        notes.append(f"{empty} of {len(answers)} answers are empty, and count as 0")
    details = [{"question": q.text, "answers": q.answers, "got": got} for q, got in zip(asked, answers, strict=True)]
    scores = _score(task, answers, [question.answers for question in asked], seed)
    options = {
        "task": task, "data": data.name, "limit": limit, "shots": settings.shots,
        "shots_data": None if shots is None else shots.name, "new_tokens": length,
    }  # fmt: skip
    return Results("scrolls", scores, options, seed, notes, {"answers": details})


def _shots(pool: Sequence[Question], document: str, count: int, rng: random.Random) -> str:
    others = [question for question in pool if question.document != document]
    if len(others) < count:
        raise ValueError(
            f"{count} shots need as many questions of other documents; got {len(others)}. Give a file of other "
            "documents by --shots-data."
        )
    chosen = rng.sample(others, count)
    return "".join(f"{shot.document}{ASKED.format(shot.text)} {shot.answers[0]}{BETWEEN}" for shot in chosen)


def _score(task: str, answers: Sequence[str], references: Sequence[Sequence[str]], seed: int) -> list[Score]:
    where, n, scores = {"task": task}, len(answers), list[Score]()
    if TASKS[task].metric == "f1":
        means = {"F1": f1_scores(answers, references)}
    else:
        rouge = rouge_scores(answers, references)
        means, mean = dict(zip(ROUGE, rouge, strict=True)), float(geometric_mean(*rouge))
        spread = bootstrap(list(rouge), geometric_mean, "questions", seed)
        scores.append(Score("geometric mean of ROUGE-1, -2, -L", mean, n, "questions", spread, where))
    for name, values in means.items():
        spread = bootstrap_mean(values, "questions", seed)
        scores.append(Score(name, float(values.mean()), n, "questions", spread, where))
    return scores
