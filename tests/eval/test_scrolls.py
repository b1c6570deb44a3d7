"""SCROLLS: scores compared with the official ones, prompts, and data in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gecko.eval.scrolls import Question, QuestionSet, f1_scores, geometric_mean, load_questions, rouge_scores, scrolls

PREDICTIONS = ["exact match example", "hello there", "general kenobi"]
REFERENCES = [["exact match example"], ["hello", "hi there"], ["commander kenobi"]]


def test_scores_are_those_that_the_official_metric_publishes() -> None:
    """The example in the documentation of SCROLLS' metric, to its four digits."""
    assert f1_scores(PREDICTIONS, REFERENCES).mean() == pytest.approx(72.2222, abs=1e-4)
    rouge = rouge_scores(PREDICTIONS, REFERENCES)
    assert rouge.mean(1) == pytest.approx([72.2222, 33.3333, 72.2222], abs=1e-4)
    assert float(geometric_mean(*rouge)) == pytest.approx(55.8136, abs=1e-4)


@pytest.mark.parametrize(
    ("prediction", "references", "f1", "rouge"),
    [
        ("The Cat, sat!", ["a cat sat"], 100, None),  # case, punctuation and articles do not count
        ("dog-house", ["doghouse"], 100, None),  # punctuation leaves no space
        ("cat cat dog", ["cat dog dog"], 200 / 3, None),  # each word counts as often as both contain it
        ("theatre an", ["the theatre"], 100, None),  # articles are whole words, not prefixes
        ("one two", ["three", "two four five", "two"], 200 / 3, None),  # the best reference
        ("yes", ["no"], 0, 0),
        ("cats run", ["cat runs"], 0, 0),  # without stemming
        ("the cat sat", ["a dog", "the cat sat"], 100, 100),
        ("", ["yes"], 0, 0),
        ("the", ["no"], 0, 0),
    ],
)
def test_f1_and_rouge(prediction: str, references: list[str], f1: float, rouge: float | None) -> None:
    assert f1_scores([prediction], [references])[0] == pytest.approx(f1)
    if rouge is not None:
        np.testing.assert_allclose(rouge_scores([prediction], [references]), [[rouge]] * 3)


@pytest.mark.parametrize("scores", [f1_scores, rouge_scores])
def test_empty_references_are_refused(scores: Any) -> None:
    with pytest.raises(ValueError, match="item 1 must have an answer"):
        scores(["a", "b"], [["a"], [" "]])
    with pytest.raises(ValueError, match="every prediction"):
        scores(["a"], [])


QUESTIONS = [Question(f"Document {n // 2}.", f"Question {n}?", (f"answer {n}", "or this")) for n in range(8)]
DATA = QuestionSet("questions.jsonl", QUESTIONS)


@pytest.mark.parametrize(("task", "shots"), [("narrative_qa", 0), ("qasper", 2), ("qmsum", 1)])
def test_prompts(rule_model: Any, task: str, shots: int) -> None:
    """``{CONTEXT} Q: {QUESTION} A:`` after the given number of shots of other documents; each document is read once."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return f" answer {prompt.split('Question ')[-1][0]}\nand more"

    model = rule_model(answer=answer)
    results = scrolls(model, task, DATA)
    assert results.scores[0].value == pytest.approx(100)
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        *before, last = prompt.split("\n\n")
        assert last == f"{question.document} Q: {question.text} A:"
        assert len(before) == shots
        for shot in before:
            source = next(q for q in QUESTIONS if f"Q: {q.text}" in shot)
            assert shot == f"{source.document} Q: {source.text} A: {source.answers[0]}"
            assert source.document != question.document
    assert sum("Document" in text for text in model.read_texts) == 4
    assert any("shots are of other documents" in note for note in results.notes) == bool(shots)


def test_shots_from_elsewhere_limits_and_empty_answers(rule_model: Any) -> None:
    elsewhere = QuestionSet("elsewhere.jsonl", [Question("Elsewhere.", "Which?", ("That.",))])
    model = rule_model(answer=lambda prompt: "\n" if "Question 0" in prompt else "or this")
    results = scrolls(model, "qmsum", DATA, shots=elsewhere, limit=3)
    assert all(text.startswith("Elsewhere. Q: Which? A: That.\n\n") for text in model.read_texts if "Document" in text)
    assert results.notes == ["only the first 3 of 8 questions", "1 of 3 answers are empty, and count as 0"]
    assert results.settings == {
        "task": "qmsum", "data": "questions.jsonl", "limit": 3, "shots": 1, "shots_data": "elsewhere.jsonl",
        "new_tokens": 256,
    }  # fmt: skip
    mean, *parts = (score.value for score in results.scores)
    assert mean == pytest.approx(float(np.cbrt(np.prod(parts)))) and results.scores[0].n == 3
    with pytest.raises(ValueError, match="2 shots need as many questions of other documents; got 1"):
        scrolls(model, "qasper", DATA, shots=elsewhere)
    with pytest.raises(ValueError, match="Did you mean 'qasper'"):
        scrolls(model, "qaspr", DATA)


MEETING = {
    "topic_list": [],
    "meeting_transcripts": [{"speaker": "A", "content": "Hello ."}, {"speaker": "B", "content": "Hi ."}],
    "general_query_list": [{"query": "Summarize.", "answer": "They met."}],
    "specific_query_list": [{"query": "Who?", "answer": "A and B.", "relevant_text_span": [["0", "1"]]}],
}  # fmt: skip


def test_records_of_scrolls_and_meetings_of_qmsum(tmp_path: Path) -> None:
    """An input contains question and document; an item with several answers is repeated with the same id."""
    rows = [
        ("1", "Why?\n\nA text.\n\nIts end.", "So."), ("2", "Who?\n\nOther.", "I."),
        ("1", "Why?\n\nA text.\n\nIts end.", "Yes."), ("3", "Where?\n\nA text.\n\nIts end.", "Here."),
    ]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(("id", "input", "output"), row, strict=True))) for row in rows))
    assert load_questions(str(path), "qasper", "validation") == ("data.jsonl", [
        Question("A text.\n\nIts end.", "Why?", ("So.", "Yes.")),
        Question("A text.\n\nIts end.", "Where?", ("Here.",)),
        Question("Other.", "Who?", ("I.",)),
    ])  # fmt: skip
    path.write_text(json.dumps(MEETING) + "\n\n")
    assert load_questions(str(path), "qmsum", "validation").questions == [
        Question("A: Hello .\nB: Hi .", "Summarize.", ("They met.",)),
        Question("A: Hello .\nB: Hi .", "Who?", ("A and B.",)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "line 1, must hold one JSON object"), ("[1]", "got a list"), ("", "holds none"),
     ('{"id": "1", "input": "a", "output": null}', "lacks .'output'."),
     ('{"id": "1", "input": "no document", "output": "x"}', "an empty line between"),
     ('{"id": "1", "input": "q\\n\\nd", "output": " "}', "question '1' must have an answer"),
     ('{"id": "1", "input": "q\\n\\n\\ud800", "output": "x"}', "question '1' must hold text that UTF-8 can write"),
     ('{"id": "1", "input": "q\\n\\nd", "output": "x"}\n{"id": "1", "input": "r\\n\\nd", "output": "x"}',
      "line 2, must have an id of its own; another question has its id '1'")],
)  # fmt: skip
def test_data_that_cannot_be_scored_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_questions(str(tmp_path / "data.jsonl"), "qasper", "validation")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_questions(str(tmp_path / "gone.jsonl"), "qasper", "validation")
