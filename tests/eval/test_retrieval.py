"""Passkey and needle tasks: texts, lengths, depths, and scoring of answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gecko.data import load_tokenizer
from gecko.eval.retrieval import (
    NEW_TOKENS,
    NOISE,
    NeedleGrid,
    Sample,
    first_number,
    haystack,
    retrieval,
    ruler_depth,
    string_match_all,
)

BOOK = "It was late. The rain fell on the town! Who was there? Nobody knew, and nobody asked. " * 200
TASKS = ("passkey", "niah_single_1", "niah_single_2")
BYTES = load_tokenizer("bytes")

RULER = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text? The special magic {type_needle_v} for {query} mentioned in the provided text are"
)


def texts_of(task: str) -> list[str]:
    return [BOOK] if task == "niah_single_2" else []


def rulers_prompt(context: str, key: str) -> str:
    """Return RULER's template for one key and one value, with RULER's modifications."""
    template = RULER.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")
    return template.format(type_needle_v="number", context=context, query=key)


def asked_key(prompt: str) -> str:
    return re.findall(r"magic number for (\S+) mentioned", prompt)[-1]


def test_noise_is_rulers_text() -> None:
    sample = haystack("niah_single_1").build(4, 0.5, random.Random(1))
    key = asked_key(sample.prompt)
    needle = f"One of the special magic numbers for {key} is: {sample.answer}."
    assert sample.prompt == rulers_prompt("\n".join([NOISE, NOISE, needle, NOISE, NOISE]), key)
    assert re.fullmatch(r"[1-9]\d{6}", sample.answer)
    assert re.fullmatch(r"\S+-\S+", key)


def test_essays_are_rulers_text() -> None:
    sample = haystack("niah_single_2", ["One  two.\nThree four? ", "Five six seven."]).build(7, 0.5, random.Random(1))
    key = asked_key(sample.prompt)
    needle = f"One of the special magic numbers for {key} is: {sample.answer}."
    assert sample.prompt == rulers_prompt(f"One two. {needle} Three four? Five six seven.", key)


def test_passkey_is_the_original_text() -> None:
    sample = haystack("passkey").build(20, 0.25, random.Random(1))
    value = int(sample.answer)
    assert sample.prompt == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\n"
        f"The g\nThe pass key is {value}. Remember it. {value} is the pass key.\nThe grass is gr\n"
        "What is the pass key? The pass key is"
    )
    assert 1 <= value <= 50_000


@settings(max_examples=30)
@given(task=st.sampled_from(TASKS), length=st.integers(800, 5000), depth=st.floats(0, 1), seed=st.integers(0, 99))
def test_samples_fill_their_length_and_keep_their_depth(task: str, length: int, depth: float, seed: int) -> None:
    hay = haystack(task, texts_of(task))
    units = hay.fit(BYTES, length)
    sample = hay.sample(BYTES, length, units, depth, str(seed))
    used = len(sample.prompt.encode()) + 1 + NEW_TOKENS[task]
    assert length - 250 < used <= length
    marks = {
        "passkey": "\nThe pass key is",
        "niah_single_1": "One of the special",
        "niah_single_2": "One of the special",
    }
    before = sample.prompt.index(marks[task]) - sample.prompt.index(".\n") - 2
    assert abs(before / (length - 400) - depth) < 0.5 * (700 / length) + 0.02
    assert sample.prompt.count(sample.answer) >= 1


def test_depths_are_exact_at_both_ends() -> None:
    for task in TASKS:
        hay = haystack(task, texts_of(task))
        first, last = (hay.build(50, depth, random.Random(0)).prompt for depth in (0.0, 1.0))
        mark = "The pass key is" if task == "passkey" else "One of the special magic"
        assert first.index(mark) < 200
        assert last.rindex("grass" if task != "niah_single_2" else "rain", 0, last.rindex("What is")) < last.index(mark)


def lines_before(sample: Sample) -> int:
    """Return the number of lines of noise before the needle."""
    return sample.prompt[: sample.prompt.index("One of the special")].count("\n") - 1


def test_drawn_places_in_noise_are_all_lines_as_rulers() -> None:
    """RULER inserts at one of ``range(lines)``: before any line, never after the last."""
    build = haystack("niah_single_1").build
    places = Counter(lines_before(build(60, None, random.Random(seed))) for seed in range(6000))
    assert set(places) == set(range(60))
    assert max(places.values()) < 3 * min(places.values())


def test_drawn_places_in_essays_are_rulers_depths() -> None:
    words = [f"w{number}." for number in range(390)]
    build = haystack("niah_single_2", [" ".join(words)]).build
    prompts = [build(390, None, random.Random(seed)).prompt for seed in range(500)]
    places = {len(re.findall(r"w\d", prompt[: prompt.index("One of the special")])) for prompt in prompts}
    assert len(places) == 40 and {0, 390} < places


def test_drawn_places_of_the_passkey_are_all_characters() -> None:
    """With 80 characters of noise, 0 to 80 of them are before the passkey."""
    prompts = [haystack("passkey").build(80, None, random.Random(seed)).prompt for seed in range(2000)]
    assert {len(prompt.split("\n")[1]) for prompt in prompts} == set(range(81))


def test_rulers_depths() -> None:
    drawn = {ruler_depth(random.Random(seed)) for seed in range(2000)}
    assert len(drawn) == 40
    assert min(drawn) == 0
    assert max(drawn) == 1


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [(" 1234567.", ["1234567"], 1), ("the number is 123456", ["1234567"], 0), ("A b\x00c", ["a B", "C", "d"], 2 / 3),
     ("", ["1"], 0)],
)  # fmt: skip
def test_string_match_all(prediction: str, references: list[str], score: float) -> None:
    assert string_match_all(prediction, references) == pytest.approx(score)


def test_first_number() -> None:
    assert [first_number(text) for text in (" 123. 456", "none", "x007")] == [123, None, 7]


def test_a_model_that_looks_it_up_is_right_everywhere(rule_model: Any, write: Any) -> None:
    def look(prompt: str) -> str:
        found = re.search(r"(?:pass key is|is:) (\d+)", prompt)
        assert found is not None
        return f" {found[1]}."

    model = rule_model(answer=look)
    for task in TASKS:
        books = write(*(text.encode() for text in texts_of(task)))
        results = retrieval(model, task, NeedleGrid([800, 1600], [0, 0.5, 1], samples=3), texts=books)
        assert [score.value for score in results.scores] == [1.0] * len(results.scores)
        assert all(score.n == 3 and score.interval is not None for score in results.scores)
        assert len(results.details["answers"]) == 18
        assert results.settings["texts"] == [book.name for book in books]
        assert results.settings["depths"] == [0, 0.5, 1]
    assert len({text for text in model.read_texts}) == 54, "all samples differ"


def test_wrong_and_empty_answers_are_counted_and_said(rule_model: Any) -> None:
    results = retrieval(rule_model(answer=lambda prompt: ""), "passkey", NeedleGrid([800], None, samples=4))
    assert [(score.value, score.where["depth"]) for score in results.scores] == [(0.0, "random")] * 2
    assert (results.settings["texts"], results.settings["depths"]) == ([], "random")
    assert results.notes == ["length 800, depth random: 4 of 4 answers are empty, and count as wrong"]


def test_bad_input_is_refused(rule_model: Any, write: Any) -> None:
    model = rule_model(answer=lambda prompt: "1")
    cases: list[tuple[str, list[int], list[str], str]] = [
        ("passkei", [800], [], "Did you mean 'passkey'"),
        ("niah_single_2", [800], [], "needs texts"),
        ("passkey", [800], [BOOK], "makes its own text"),
        ("niah_single_1", [200], [], "200 tokens do not hold"),
        ("niah_single_2", [4000], ["Too few words."], "must fill 4,000 tokens; their 3 words do not"),
    ]
    for task, lengths, texts, message in cases:
        with pytest.raises(ValueError, match=message):
            retrieval(model, task, NeedleGrid(lengths), texts=write(*(text.encode() for text in texts)))
    with pytest.raises(ValueError, match=r"0\.\.1"):
        NeedleGrid([800], [1.5])
    with pytest.raises(ValueError, match="at least 1"):
        NeedleGrid([], [0.5])
