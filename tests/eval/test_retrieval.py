"""Passkey and needle tasks: texts, lengths, depths, and scoring of answers."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gecko.data import Tokenizer, load_tokenizer
from gecko.eval.retrieval import (
    OF_TEXTS,
    TASKS,
    WITH_DEPTH,
    Haystack,
    NeedleGrid,
    first_number,
    matched,
    retrieval,
    units_by_length,
)
from gecko.eval.ruler import NOISE, Sample, drawn_depths
from gecko.eval.scored_model import Text

BOOK = "It was late. The rain fell on the town! Who was there? Nobody knew, and nobody asked. " * 200
SINGLE = ("passkey", "niah_single_1", "niah_single_2")
BYTES = load_tokenizer("bytes")
SQUAD = {
    "data": [
        {"paragraphs": [
            {"context": f"The town {name} lies on the river {name}ine. " * 10, "qas": [
                {"question": f"Where does {name} lie?",
                 "answers": [{"text": f"on the {name}ine"}, {"text": f"{name}ine"}]},
                {"question": "Why?", "answers": [], "is_impossible": True},
            ]} for name in (f"{first}{last}" for last in ("den", "burg", "feld"))
        ]} for first in ("Arn", "Eber", "Neu", "Lich", "Ro")
    ]
}  # fmt: skip
UNEVEN = {"data": [{"paragraphs": [
    {"context": f"{name} is here. " * count, "qas": [{"question": f"Where is {name}?", "answers": [{"text": "here"}]}]}
    for name, count in (("Anna", 1), ("Berta", 200), ("Clara", 1))
]}]}  # fmt: skip
"""The paragraph of the second question is longer than that of the first."""
HOTPOT = [
    {"question": f"Who founded the town of {name}?", "answer": f"Count {name}",
     "context": [
         [f"{name} {part}", [f"Count {name} founded it. ", f"It has {part} gates. " * 30]] for part in range(3)
     ]}
    for name in ("Anna", "Berta", "Clara", "Dora")
]  # fmt: skip

RULER = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text? The special magic {type_needle_v} for {query} mentioned in the provided text are"
)


CONTENTS = {**dict.fromkeys(OF_TEXTS, BOOK), "qa_1": json.dumps(SQUAD), "qa_2": json.dumps(HOTPOT)}


@pytest.fixture
def texts_of(write: Any) -> Callable[[str], list[Text]]:
    return lambda task: write(CONTENTS[task].encode()) if task in CONTENTS else []


def haystack(task: str, tokenizer: Tokenizer, length: int, texts: Sequence[Text] = ()) -> Haystack:
    return Haystack(task, tokenizer, length, units_by_length(task, tokenizer, texts)(length))


def one(hay: Haystack, units: int, depth: float | None, seed: int = 1) -> Sample:
    return hay.units.build(units, depth, random.Random(seed), 0)


def rulers_prompt(context: str, query: str, kind: str, single: bool) -> str:
    """Return RULER's template, for one key and one value with RULER's modifications."""
    template = RULER
    if single:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        template, kind = template.replace("answers", "answer"), kind[:-1]
    return template.format(type_needle_v=kind, context=context, query=query)


def asked_keys(prompt: str) -> list[str]:
    (found,) = re.findall(r"provided text\? The special magic \S+ for (.*) mentioned", prompt)
    return re.split(r", and |, ", found)


def test_noise_and_essays_are_rulers_text(write: Any) -> None:
    books = write(b"One  two.\nThree four? ", b"Five six seven.")
    for task, found, units, context in (
        ("niah_single_1", [], 4, f"{NOISE}\n{NOISE}\n{{}}\n{NOISE}\n{NOISE}"),
        ("niah_single_2", books, 7, "One two. {} Three four? Five six seven."),
    ):  # fmt: skip
        sample = one(haystack(task, BYTES, 4096, found), units, 0.5)
        (key,) = asked_keys(sample.prompt)
        needle = f"One of the special magic numbers for {key} is: {sample.answers[0]}."
        assert sample.prompt == rulers_prompt(context.format(needle), key, "numbers", True)
        assert re.fullmatch(r"[1-9]\d{6}", sample.answers[0]) and re.fullmatch(r"\S+-\S+", key)


def test_passkey_is_the_original_text() -> None:
    sample = one(haystack("passkey", BYTES, 4096), 20, 0.25)
    value = int(sample.answers[0])
    assert sample.prompt == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n"
        f"The g\nThe pass key is {value}. Remember it. {value} is the pass key.\nThe grass is gr\n"
        "What is the pass key? The pass key is"
    )
    assert 1 <= value <= 50_000


@pytest.mark.parametrize(
    ("task", "needles", "answers", "kind"),
    [("niah_single_3", 1, 1, "uuids"), ("niah_multikey_1", 4, 1, "numbers"), ("niah_multikey_2", 31, 1, "numbers"),
     ("niah_multikey_3", 31, 1, "uuids"), ("niah_multivalue", 4, 4, "numbers"), ("niah_multiquery", 4, 4, "numbers")],
)  # fmt: skip
def test_needles_are_rulers(task: str, needles: int, answers: int, kind: str, texts_of: Any) -> None:
    """The number of needles and answers, their kinds, the template, and places that are not always the same."""
    build, places = haystack(task, BYTES, 4096, texts_of(task)).units.build, set()
    for seed in range(20):
        sample = build(30, None, random.Random(seed), 0)
        hidden = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", sample.prompt)
        assert len(hidden) == needles and {kind for kind, _, _ in hidden} == {kind}
        keys = asked_keys(sample.prompt)
        assert Counter(sample.answers) == Counter(value for _, key, value in hidden if key in keys)
        assert len(sample.answers) == answers
        context = sample.prompt.partition("afterwards.\n")[2].rpartition("\nWhat ")[0]
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        assert sample.prompt == rulers_prompt(context, query, kind, answers == 1)
        places.add(context.index("One of the special magic numbers for" if kind == "numbers" else sample.answers[0]))
    assert len(places) > 3 or task == "niah_multikey_2"


def test_variables_are_rulers() -> None:
    sample = one(haystack("vt", BYTES, 4096), 20, None)
    example, asked = sample.prompt.split("\n\nMemorize")
    for text, letters in ((example, 3), ("Memorize" + asked, 5)):
        chain = re.findall(rf"^VAR ([A-Z]{{{letters}}}) = (\w+)(?: ([A-Z]+) ?)?$", text, re.MULTILINE)
        assert len(chain) == 5 and [value for _, value, _ in chain[1:]] == ["VAR"] * 4
        assert [earlier for _, _, earlier in chain[1:]] == [name for name, _, _ in chain[:-1]]
        value = int(chain[0][1])
        assert text.count(f"assigned the value {value}") == 2 and "text above, 5 variables are assigned" in text
    assert sample.answers == tuple(name for name, _, _ in chain)
    assert example.endswith(f"they are:  {' '.join(re.findall('VAR ([A-Z]{3}) =', example))}")
    assert asked.endswith("they are: ") and asked.count(NOISE) == 20
    assert asked.index("\n\n") < asked.index("\nQuestion: Find all variables")


@pytest.mark.parametrize(
    ("length", "frequent", "rare", "shown"), [(2048, 6, 1, (3, 1, 20)), (8192, 30, 3, (10, 3, 40))]
)
def test_common_words_are_rulers(length: int, frequent: int, rare: int, shown: tuple[int, int, int]) -> None:
    sample = one(haystack("cwe", BYTES, length), 50, None)
    example, asked = sample.prompt.split("\nBelow")
    for text, repeats, words in ((example, shown[:2], shown[2]), (asked, (frequent, rare), 50)):
        context = text.partition("most often.\n")[2].partition("\nQuestion")[0]
        counts = Counter(re.findall(r"\d+\. (\D+?)(?= \d+\.|$)", context))
        assert Counter(counts.values()) == {repeats[0]: 10, repeats[1]: words - 10}
        common = [word for word, count in counts.items() if count == repeats[0]]
    assert sorted(sample.answers) == sorted(common)
    assert re.search(r"in the list are: 1\. .* 10\. \S+$", example) and asked.endswith("in the list are:")


def test_frequent_words_follow_rulers_law() -> None:
    sample = one(haystack("fwe", BYTES, 4050), 1000, None)
    words = sample.prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split(" ")
    ranked = Counter(words).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
    assert [count for _, count in ranked] == [int(1000 / rank**2 / 1.6449340668) for rank in range(1, 25)]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


@pytest.mark.parametrize(("task", "needed"), [("qa_1", 1), ("qa_2", 3)])
def test_questions_are_about_their_documents(task: str, needed: int, texts_of: Any) -> None:
    units = haystack(task, BYTES, 4096, texts_of(task)).units
    assert units.least == needed
    seen = set()
    for number in range(units.most or 0):
        for count in (needed, needed + 2, units.most or 0):
            sample = units.build(count, None, random.Random(number), number)
            documents = re.findall(r"Document (\d+):\n(.*?)(?=\n\n(?:Document \d|Answer))", sample.prompt, re.DOTALL)
            assert [int(place) for place, _ in documents] == list(range(1, count + 1))
            assert len({document for _, document in documents}) == count
            assert any(sample.answers[-1] in document for _, document in documents)
            question = re.findall(r"Question: (.*) Answer:$", sample.prompt)[0]
            seen.add(question)
            assert matched(f" It is {sample.answers[-1].upper()}.", sample) == 1 and matched("Why?", sample) == 0
    assert len(seen) == {"qa_1": 15, "qa_2": 4}[task]
    assert sample.prompt.startswith("Answer the question based on the given documents. Only give me the answer")


@pytest.mark.parametrize("task", sorted(TASKS))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(2500, 6000), depth=st.floats(0, 1), seed=st.integers(0, 99))
def test_samples_fill_their_length_and_keep_their_depth(
    task: str, texts_of: Any, length: int, depth: float, seed: int
) -> None:
    hay = haystack(task, BYTES, length, texts_of(task))
    units, chosen = hay.fit(), task in WITH_DEPTH
    sample = hay.sample(units, depth if chosen else None, str(seed))
    used = len(sample.prompt.encode()) + 1 + TASKS[task]
    unit = {"cwe": 600, "fwe": 600, "qa_1": 700, "qa_2": 700}.get(task, 260)
    assert length - unit < used <= length
    if task in SINGLE:
        mark = "\nThe pass key is" if task == "passkey" else "One of the special"
        before = sample.prompt.index(mark) - sample.prompt.index(".\n") - 2
        assert abs(before / (length - 400) - depth) < 0.5 * (700 / length) + 0.02


def test_depths_are_exact_at_both_ends(texts_of: Any) -> None:
    for task in SINGLE:
        hay = haystack(task, BYTES, 4096, texts_of(task))
        first, last = (one(hay, 50, depth).prompt for depth in (0.0, 1.0))
        mark = "The pass key is" if task == "passkey" else "One of the special magic"
        assert first.index(mark) < 200
        assert last.rindex("grass" if task != "niah_single_2" else "rain", 0, last.rindex("What is")) < last.index(mark)


def test_drawn_places_are_those_of_the_original_tests(write: Any) -> None:
    """RULER inserts before any line of noise, never after the last, and at 40 depths of essays; the passkey stands
    before any character of its noise, or at the end."""
    essays = write(" ".join(f"w{number}." for number in range(390)).encode())
    cases: list[tuple[str, list[Text], int, int, Callable[[str], int], set[int]]] = [
        ("niah_single_1", [], 60, 2000, lambda before: before.count("\n") - 1, set(range(60))),
        ("niah_single_2", essays, 390, 500, lambda before: len(re.findall(r"w\d", before)), {0, 390}),
        ("passkey", [], 80, 1500, lambda before: len(before.split("\n")[1]), set(range(81))),
    ]
    for task, found, units, samples, place, expected in cases:
        hay = haystack(task, BYTES, 4096, found)
        prompts = [one(hay, units, None, seed).prompt for seed in range(samples)]
        marks = "\nThe pass key is" if task == "passkey" else "One of the special"
        places = Counter(place(prompt[: prompt.index(marks)]) for prompt in prompts)
        assert len(places) == (40 if task == "niah_single_2" else len(expected)) and expected <= set(places), task
        if task == "niah_single_1":
            assert max(places.values()) < 5 * min(places.values())
    drawn = [depth for seed in range(500) for depth in drawn_depths(4, random.Random(seed))]
    assert (len(set(drawn)), min(drawn), max(drawn)) == (40, 0, 1)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [(" 1234567.", ["1234567"], 1), ("the number is 123456", ["1234567"], 0), ("A b\x00c", ["a B", "C", "d"], 2 / 3),
     ("", ["1"], 0)],
)  # fmt: skip
def test_string_match(prediction: str, references: list[str], score: float) -> None:
    assert matched(prediction, Sample("", tuple(references))) == pytest.approx(score)
    assert matched(prediction, Sample("", tuple(references), one_suffices=True)) == (score > 0)
    assert [first_number(text) for text in (" 123. 456", "none", "x007")] == [123, None, 7]


def solve(prompt: str) -> str:
    """Answer a prompt from its text alone, by the meaning of its words."""
    if "pass key" in prompt:
        return re.findall(r"pass key is (\d+)\.", prompt)[0]
    if "special magic" in prompt:
        hidden = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", prompt)
        return ", ".join(value for key, value in hidden if key in asked_keys(prompt))
    if "chain(s)" in prompt:
        asked = prompt.rpartition("Memorize and track")[2]
        (known,) = re.findall(r"VAR (\w+) = \d", asked)
        names = [known]
        while later := re.findall(rf"VAR (\w+) = VAR {names[-1]}\b", asked):
            names += later
        return " ".join(names)
    if "numbered list" in prompt:
        asked = prompt.rpartition("most often.\n")[2].partition("\nQuestion")[0]
        words = re.findall(r"\d+\. (\D+?)(?= \d+\.|$)", asked)
        return " ".join(word for word, _ in Counter(words).most_common(10))
    if "coded text" in prompt:
        words = prompt.partition("coded words. ")[2].partition("\nQuestion")[0].split()
        return " ".join(word for word, _ in Counter(words).most_common(4)[1:])
    name = re.findall(r"Question: .*?([A-Z]\w+)(?: lie)?\? Answer:", prompt)[0]
    return f"Count {name}" if "founded" in prompt else f"on the {name}ine"


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_model_that_knows_is_right_everywhere_and_one_that_guesses_is_not(
    task: str, rule_model: Any, texts_of: Any
) -> None:
    depths, asked = ([0, 0.5, 1] if task in WITH_DEPTH else None), texts_of(task)
    model = rule_model(answer=solve)
    grid = NeedleGrid([2500, 4500], depths, samples=2)
    results = retrieval(model, task, grid, texts=asked)
    assert [score.value for score in results.scores] == [1.0] * len(results.scores)
    assert all(score.n == 2 and score.interval is not None for score in results.scores)
    count = 4 * len(depths or [None])
    assert len(results.details["answers"]) == len(set(model.read_texts)) == count, "all samples differ"
    assert all(answer["tokens"] + TASKS[task] <= answer["length"] for answer in results.details["answers"])
    assert results.settings["texts"] == [book.name for book in asked]
    assert results.settings["depths"] == (depths or "random")
    guessed = retrieval(rule_model(answer=lambda prompt: " 1234567 and ABCDE"), task, grid, texts=asked)
    assert [score.value for score in guessed.scores] == [0.0] * len(guessed.scores)
    if task == "niah_multivalue":
        half = rule_model(answer=lambda prompt: ", ".join(solve(prompt).split(", ")[:2]))
        (score,) = retrieval(half, task, NeedleGrid([3000], None, samples=4), texts=asked).scores
        assert (score.name, score.value, score.n) == ("string_match_all", 0.5, 4)


def test_a_tokenizer_with_other_pieces_has_longer_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.WordLevel({"[UNK]": 0, "<|endoftext|>": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for task in ("niah_multikey_2", "vt", "cwe", "fwe"):
        hay = haystack(task, words, 3000)
        sample = hay.sample(hay.fit(), None, "0")
        assert 2900 - 60 * (task == "cwe") < len(words.encode(sample.prompt)) + 1 + TASKS[task] <= 3000
        assert hay.fit() > 1.5 * haystack(task, BYTES, 3000).fit()


def test_wrong_and_empty_answers_are_counted_and_said(rule_model: Any) -> None:
    results = retrieval(rule_model(answer=lambda prompt: ""), "passkey", NeedleGrid([800], None, samples=4))
    assert [(score.value, score.where["depth"]) for score in results.scores] == [(0.0, "random")] * 2
    assert (results.settings["texts"], results.settings["depths"]) == ([], "random")
    assert results.notes == ["length 800, depth random: 4 of 4 answers are empty, and count as wrong"]


REFUSED: list[tuple[str, int, list[str], str]] = [
    ("passkei", 800, [], "Did you mean 'passkey'"),
    ("niah_single_2", 800, [], "needs texts"),
    ("passkey", 800, [BOOK], "makes its own text"),
    ("niah_single_1", 200, [], "200 tokens do not hold"),
    ("niah_single_2", 4000, ["Too few words."], "must fill 4,000 tokens; its 3 words do not"),
    ("cwe", 2_000_000, [], "cwe must fill 2,000,000 tokens; its 8,166 words do not"),
    ("qa_1", 40_000, [json.dumps(SQUAD)], "qa_1 must fill 40,000 tokens; its 15 documents do not"),
    ("qa_1", 1400, [json.dumps(UNEVEN)], "1,400 tokens do not hold those of qa_1"),
    ("qa_1", 4000, [], "needs a file of questions in SQuAD's form"),
    ("qa_2", 4000, ["[]", "[]"], "takes one file"),
    ("qa_1", 4000, ["not JSON"], "must hold questions in SQuAD's form"),
    ("qa_1", 4000, ["[" * 100_000], "nested too deep"),
    ("qa_1", 4000, [json.dumps(HOTPOT)], "must hold questions in SQuAD's form"),
    ("qa_2", 4000, [json.dumps(SQUAD)], "must hold questions in HotpotQA's form"),
    ("qa_2", 4000, ["[]"], "must have a question"),
    ("qa_2", 4000, [json.dumps([{"question": 1, "answer": "x", "context": []}])], "must be text; got 1"),
    ("qa_2", 4000, [json.dumps([{**HOTPOT[0], "answer": " "}])], "must be text; got ' '"),
    ("qa_2", 4000, [json.dumps([*HOTPOT, {**HOTPOT[0], "context": []}])], "the context of 'Who founded .*' has none"),
    ("qa_2", 4000, [json.dumps([{**HOTPOT[0], "question": "\ud800"}])], "got half a surrogate pair"),
]


@pytest.mark.parametrize(("task", "length", "contents", "message"), REFUSED)
def test_bad_input_is_refused(
    task: str, length: int, contents: list[str], message: str, rule_model: Any, write: Any
) -> None:
    depths = [0.5] if task in WITH_DEPTH else None
    with pytest.raises(ValueError, match=message):
        retrieval(rule_model(answer=solve), task, NeedleGrid([length], depths), texts=write(*map(str.encode, contents)))


def test_questions_are_asked_once_and_all_fit_before_the_first_answer(rule_model: Any, write: Any) -> None:
    """Repeated questions would narrow the interval, and a paragraph that is too long would lose the answers so far."""
    answered: list[str] = []

    def answer(prompt: str) -> str:
        answered.append(prompt)
        return solve(prompt)

    texts, grid = write(json.dumps(HOTPOT).encode()), NeedleGrid([3000], None, samples=50)
    results = retrieval(rule_model(answer=answer), "qa_2", grid, texts=texts)
    assert [score.n for score in results.scores] == [len(HOTPOT)] == [len(set(answered))]
    assert results.notes == ["4 samples, one for each question"]
    answered.clear()
    with pytest.raises(ValueError, match="1,400 tokens do not hold"):
        retrieval(rule_model(answer=answer), "qa_1", NeedleGrid([1400], None), texts=write(json.dumps(UNEVEN).encode()))
    assert not answered


def test_bad_grids_are_refused(rule_model: Any) -> None:
    for make, message in (
        (lambda: NeedleGrid([800], [1.5]), r"0\.\.1"), (lambda: NeedleGrid([], [0.5]), "at least 1"),
        (lambda: retrieval(rule_model(answer=solve), "vt", NeedleGrid([4000])), "places are drawn"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()
