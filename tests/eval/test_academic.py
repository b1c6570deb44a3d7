"""lm-evaluation-harness with our model: its requests, and the tasks of Table 1 read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.eval import GeckoModel
from gecko.eval.academic import TASKS, academic

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from gecko.eval.academic import HarnessModel

WORDS = st.text("abc .é", min_size=1, max_size=30).filter(str.strip)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


@torch.no_grad()
def log_probabilities(model: GeckoModel, text: str) -> torch.Tensor:
    """Return the log-probability of every byte of a document, from the logits of one call."""
    tokens = torch.tensor([[256, *text.encode()]])
    logits, _ = model.model(tokens[:, :-1])
    return logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)


def total(model: GeckoModel, context: str, choice: str) -> float:
    return float(log_probabilities(model, f"{context} {choice}")[len(context) :].sum())


@settings(max_examples=15)
@given(context=WORDS, one=WORDS, two=WORDS)
def test_loglikelihood_is_that_of_the_whole_text(model: GeckoModel, context: str, one: str, two: str) -> None:
    harness, pairs = HarnessModel(model), [(context, one), (context, two), (one, two), ("", one)]
    found = harness.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (before, text), (value, greedy) in zip(pairs, found, strict=True):
        moved = len(before.rstrip().encode())  # spaces at the end of a context count towards the continuation
        assert value == pytest.approx(float(log_probabilities(model, before + text)[moved:].sum()))
        assert isinstance(greedy, bool)
    (rolling,) = harness.loglikelihood_rolling(requests("loglikelihood_rolling", (one,)), disable_tqdm=True)
    assert rolling == pytest.approx(found[-1][0]), "that of every token"


def test_greedy_answers_count_as_greedy(model: GeckoModel) -> None:
    harness = HarnessModel(model)
    settings_of = {"until": [], "max_gen_toks": 3}
    (text,) = harness.generate_until(requests("generate_until", ("Who is", settings_of)), disable_tqdm=True)
    tokens = model.write(model.read(torch.tensor([256, *b"Who is"])), 3)
    assert text == tokens
    until = {"until": [tokens[1], ""], "max_gen_toks": 3, "do_sample": False}
    assert harness.generate_until(requests("generate_until", ("Who is", until)), disable_tqdm=True) == [tokens[:1]]
    with pytest.raises(ValueError, match="must be greedy"):
        harness.generate_until(requests("generate_until", ("a", {"do_sample": True})), disable_tqdm=True)


def save(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("academic")
    sides = [("dig", "fly"), ("a pan", "sand"), ("run", "eat it"), ("no", "yes")]
    items = [{"goal": f"Do {n}", "sol1": a, "sol2": b, "label": n % 2} for n, (a, b) in enumerate(sides)]
    save(folder, "piqa_val", items)
    save(folder, "nq_open_val", [{"question": f"who is {n}", "answer": [f"Person {n}", "x"]} for n in range(8)])
    item = {"choices": ["one", "two", "three", "four"], "answer": 2}
    for subject, count in (("anatomy", 3), ("astronomy", 2)):
        save(folder, f"mmlu_{subject}_dev", [{"question": f"shot {n}", **item} for n in range(5)])
        save(folder, f"mmlu_{subject}_test", [{"question": f"asked {n}", **item} for n in range(count)])
    return folder


def test_choices_are_those_of_the_likeliest_text(model: GeckoModel, data: Path, tmp_path: Path) -> None:
    """Also by characters, which the harness itself does not have for Social IQa."""
    results = academic(model, ["piqa"], data=data)
    right = {"acc": 0, "acc_norm": 0}
    for row in map(json.loads, (data / "piqa_val.jsonl").read_text().splitlines()):
        first, second = (total(model, f"Question: {row['goal']}\nAnswer:", row[side]) for side in ("sol1", "sol2"))
        right["acc"] += (second > first) == row["label"]
        right["acc_norm"] += (second / len(row["sol2"]) > first / len(row["sol1"])) == row["label"]
    assert {score.name: score.value * 4 for score in results.scores} == right
    assert all(score.n == 4 and score.interval is not None for score in results.scores)
    answers = {"answerA": "x", "answerB": "a long answer", "answerC": "a longer answer still"}
    save(tmp_path, "social_iqa_val", [{"context": "c", "question": "q?", "label": "2", **answers} for _ in range(2)])
    (found,) = [score for score in academic(model, ["social_iqa"], data=tmp_path).scores if score.name == "acc_norm"]
    by_length = [total(model, "Q: c q?\nA:", one) / len(one) for one in answers.values()]
    assert found.value == (max(by_length) == by_length[1])


@pytest.mark.parametrize(("column", "answer"), [("label", int), ("answer", bool)])
def test_boolq_is_normalised_by_the_answer_alone(model: GeckoModel, tmp_path: Path, column: str, answer: type) -> None:
    """Table 1's metric is first, and subtracts the log-probability of " yes" or " no" after "Answer:"."""
    rows = [{"passage": f"It is {n}.", "question": f"is it {n}", column: answer(n % 2)} for n in range(4)]
    save(tmp_path, "boolq_val", rows)
    scores = academic(model, ["boolq"], data=tmp_path).scores
    right = dict.fromkeys(("acc_mutual_info", "acc"), 0)
    for row in rows:
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        no, yes = (total(model, context, choice) for choice in ("no", "yes"))
        right["acc"] += (yes > no) == row[column]
        ahead = yes - total(model, "Answer:", "yes") > no - total(model, "Answer:", "no")
        right["acc_mutual_info"] += ahead == row[column]
    assert [(score.name, score.value * 4) for score in scores] == list(right.items())


def test_all_that_a_folder_holds(model: GeckoModel, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shots are those of Table 1, MMLU is over the items of all subjects, and missing files are reported."""
    prompts: list[str] = []
    read = GeckoModel.read

    def spy(self: GeckoModel, tokens: torch.Tensor, after: Any = None) -> Any:
        prompts.append(self.tokenizer.decode(tokens.tolist()))
        return read(self, tokens, after)

    monkeypatch.setattr(GeckoModel, "read", spy)
    results = academic(model, [], data=data, limit=2)
    scores = {(score.where["task"], score.name): score for score in results.scores}
    assert (scores["mmlu", "acc"].n, scores["nq_open", "exact_match"].n) == (4, 2)
    assert results.settings["shots"] == {"mmlu_anatomy": 5, "mmlu_astronomy": 5, "piqa": 0, "nq_open": 5}
    asked = [prompt for prompt in prompts if "asked 1" in prompt]
    assert len(asked) == 2 and all(prompt.count("shot") == 5 for prompt in asked)
    for number in range(2):
        (prompt,) = [prompt for prompt in prompts if prompt.endswith(f"Q: who is {number}?\nA:")]
        assert prompt.count("who is") == 6
        assert prompt.count(f"who is {number}?") == 1, "the item itself is none of its shots"
    assert any("other items of the validation split" in note for note in results.notes)
    assert sum("skipped" in note for note in results.notes) == len(TASKS) - 3
    assert any("2 subjects" in note for note in results.notes)


@pytest.mark.parametrize("change", [{"label": -1}, {"label": "sol1"}, {"answer": 0}], ids=str)
def test_answers_that_are_no_choices_are_refused(model: GeckoModel, tmp_path: Path, change: dict[str, Any]) -> None:
    """As in test splits without answers, and in files with other columns. The harness would count them as wrong."""
    item = {"goal": "Do it", "sol1": "dig", "sol2": "fly"}
    save(tmp_path, "piqa_val", [{**item, **({"label": 0} if "label" in change else change)}, {**item, **change}])
    with pytest.raises(ValueError, match=r"item [01] is .* columns goal, sol1, sol2, .* baber/piqa"):
        academic(model, ["piqa"], data=tmp_path)


def test_what_cannot_be_evaluated_is_refused(model: GeckoModel, data: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    save(tmp_path / "train", "piqa_train", [{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}])
    for tasks, folder, kind, message in (
        (["pica"], data, ValueError, "Did you mean 'piqa'"),
        (["boolq"], data, FileNotFoundError, "no file of boolq"),
        ([], tmp_path, FileNotFoundError, "holds none of the tasks"),
        ([], tmp_path / "gone", FileNotFoundError, "there is no folder"),
        (["piqa"], tmp_path / "train", FileNotFoundError, "piqa_val or piqa_test"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            academic(model, tasks, data=folder)


MMLU = {"question": "asked", "choices": ["one", "two", "three", "four"], "answer": 2}
ARC = {"question": "why?", "choices": {"text": ["so", "no"], "label": ["A", "B"]}, "answerKey": "B"}
ENDINGS = {"activity_label": "A", "ctx_a": "He", "ctx_b": "", "endings": ["x", "y", "z", "u"], "label": "0"}
GAP = {"sentence": "The _ is big.", "option1": "dog", "option2": "cat", "answer": "1"}
DAMAGED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("piqa_val", {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}, {"goal": None}, "item 1, must have a whole goal"),
    ("piqa_val", {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}, {"sol1": " "}, "item 1, must have a whole sol1"),
    ("boolq_val", {"passage": "a", "question": "b", "label": 0}, {"passage": None}, "must have a whole passage"),
    ("arc_easy_test", ARC, {"choices": {"text": ["so"], "label": ["A", "B"]}}, "must have a whole choices"),
    ("arc_easy_test", ARC, {"answerKey": "E"}, "arc_easy cannot be evaluated|one of its choices"),
    ("hellaswag_val", ENDINGS, {"endings": ["x", "[y]", "z", "u"]}, "hellaswag cannot be evaluated|its choices"),
    ("hellaswag_val", ENDINGS, {"label": "4"}, "one of its choices"),
    ("winogrande_val", GAP, {"answer": ""}, "must have a whole answer"),
    ("winogrande_val", GAP, {"answer": "3"}, "one of its choices"),
    ("nq_open_val", {"question": "who", "answer": ["x"]}, {"answer": []}, "must have a whole answer"),
    ("mmlu_anatomy_test", MMLU, {"choices": [*MMLU["choices"], "five"]}, "must have four choices"),
    ("mmlu_anatomy_dev", MMLU, {"answer": -1}, "must be one of its choices"),
]


@pytest.mark.parametrize(("name", "item", "change", "message"), DAMAGED)
def test_damaged_items_are_refused_and_whole_ones_scored(
    model: GeckoModel, tmp_path: Path, name: str, item: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    """Also of shots, which the harness would put into every prompt."""
    kinds = ("mmlu_anatomy_dev", "mmlu_anatomy_test") if name.startswith("mmlu") else (name,)
    for kind in kinds:
        rows = [{**item, **({"question": f"asked {n}"} if "question" in item else {})} for n in range(8)]
        save(tmp_path, kind, rows)
    assert academic(model, [], data=tmp_path, limit=2).scores
    save(tmp_path, name, [rows[0], {**rows[1], **change}, *rows[2:]])
    with pytest.raises(ValueError, match=message):
        academic(model, [], data=tmp_path, limit=2)


def test_files_that_cannot_be_used_are_named(model: GeckoModel, tmp_path: Path) -> None:
    item = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
    for content in ("", "{broken"):
        (tmp_path / "piqa_val.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"piqa_val\.jsonl must hold the items of piqa"):
            academic(model, ["piqa"], data=tmp_path)
    for name in ("piqa_val", "piqa_validation"):
        save(tmp_path, name, [item])
    with pytest.raises(ValueError, match=r"a split must be one file; .* has piqa_val\.jsonl and piqa_v"):
        academic(model, ["piqa"], data=tmp_path)
    (tmp_path / "few").mkdir()
    save(tmp_path / "few", "nq_open_val", [{"question": f"who {n}", "answer": ["x"]} for n in range(5)])
    with pytest.raises(ValueError, match="nq_open must have 5 shots beside an item; there are 5"):
        academic(model, ["nq_open"], data=tmp_path / "few")
