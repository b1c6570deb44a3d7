"""Questions about long documents: SCROLLS' records, from files or the hub, and QMSum's own meetings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gecko.extras import require

HUB = "zip://{task}/{split}.jsonl::https://huggingface.co/datasets/{name}/resolve/main/{task}.zip"
"""How SCROLLS lies on the hub: a folder of JSON Lines in an archive for each task."""


@dataclass(frozen=True)
class Question:
    document: str
    """The context. Questions of one document come one after the other."""
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    name: str
    """Of its file, or of the data set on the hub."""
    questions: Sequence[Question]


def load_questions(source: str, task: str, split: str) -> QuestionSet:
    """The questions of a file, or of a data set on the hub.

    Args:
        source: a JSON Lines file of SCROLLS' records (id, input, output) or of QMSum's meetings, or the name of a
            data set that lies on the hub as ``tau/scrolls`` does.
        task, split: of a data set on the hub.

    Raises:
        FileNotFoundError, ValueError: nothing there, records of another kind, or none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        name, questions = path.name, _of_records(_json_lines(path))
    elif path.suffix or path.is_absolute() or source.count("/") != 1:
        raise FileNotFoundError(f"--data must be a JSON Lines file, or a name on the hub; there is no file {path}.")
    else:
        datasets = require("datasets", "eval")
        name, address = source, HUB.format(name=source, task=task, split=split)
        rows = datasets.load_dataset("json", data_files={split: address}, split=split)
        questions = _of_records((f"{source}, row {row},", dict(record)) for row, record in enumerate(rows))
    if not questions:
        raise ValueError(f"{source} must hold at least one question with an answer; it holds none.")
    return QuestionSet(name, sorted(questions, key=_order_of_documents(questions)))


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number},"
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} must hold one JSON object; got invalid JSON ({error}).") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where} must hold one JSON object; got a {type(record).__name__}.")
            yield where, record


def _of_records(records: Iterator[tuple[str, dict[str, Any]]]) -> list[Question]:
    """SCROLLS repeats an item once for each of its answers, under one id."""
    several: dict[str, Question] = {}
    for where, record in records:
        if "meeting_transcripts" in record:
            for number, question in enumerate(_of_meeting(record)):
                several[f"{where} {number}"] = question
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
        known = several.get(record["id"])
        answers = (*known.answers, record["output"]) if known else (record["output"],)
        first = known or Question(document.strip(), question.strip(), ())
        several[record["id"]] = dataclasses.replace(first, answers=answers)
    return list(several.values())


def _of_meeting(record: Mapping[str, Any]) -> Iterator[Question]:
    """The queries about a whole meeting, and those about parts of it: both see all of it."""
    lines = (f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"])
    document = "\n".join(lines)
    for item in (*record.get("general_query_list", []), *record.get("specific_query_list", [])):
        yield Question(document, item["query"].strip(), (item["answer"].strip(),))


def _order_of_documents(questions: list[Question]) -> Any:
    first = {question.document: place for place, question in reversed(list(enumerate(questions)))}
    return lambda question: first[question.document]
