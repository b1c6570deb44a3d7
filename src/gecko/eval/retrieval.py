"""Retrieval of one number from long texts, by length and depth: passkey, and RULER's tasks with a single needle.

Words, templates and units are those of the original passkey test and of RULER's ``niah_single_1`` (noise) and
``niah_single_2`` (essays, or the given texts), in their form for base models. The depth of a sample is the fraction of
the haystack before the needle. It is given, or drawn as the original test draws it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from gecko.data import Tokenizer, document_ids
from gecko.eval.results import Report, Results, Score, quiet, share
from gecko.eval.scored_model import ScoredModel, Text
from gecko.records import unknown_name
from gecko.runtime.process import require

Task = Literal["passkey", "niah_single_1", "niah_single_2"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n{before}\nThe pass key is {value}. Remember it. {value} is the pass key.\n"
    "{after}\nWhat is the pass key? The pass key is"
)
NEW_TOKENS: dict[str, int] = {"passkey": 10, "niah_single_1": 128, "niah_single_2": 128}
"""Tokens per answer in the original tests; they count towards the length."""
_DEPTHS_OF_RULER = 40


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Haystack:
    """Generator of a task's samples.

    Attributes:
        build: function of the number of units, the depth in 0..1 (None: drawn) and a generator; returns a sample.
        most: largest number of units; None if it is unlimited.
    """

    task: str
    build: Callable[[int, float | None, random.Random], Sample]
    most: int | None

    def fit(self, tokenizer: Tokenizer, length: int) -> int:
        """Return the largest number of units with which document start, sample and answer fit into ``length`` tokens.

        Raises:
            ValueError: not even one unit fits, or the given texts are too short.
        """
        room = length - NEW_TOKENS[self.task] - 1

        def fits(units: int) -> bool:
            return len(tokenizer.encode(self.build(units, 0.5, random.Random(0)).prompt)) <= room

        if not fits(1):
            raise ValueError(
                f"a length must hold question, needle and an answer of {NEW_TOKENS[self.task]} tokens; "
                f"{length:,} tokens do not hold those of {self.task}. Try a larger length."
            )
        low, high = 1, 2
        while (self.most is None or high <= self.most) and fits(high):
            low, high = high, 2 * high
        if self.most is not None and high > self.most:
            if fits(self.most):
                raise ValueError(
                    f"the texts given must fill {length:,} tokens; their {self.most:,} words do not. Give more texts, "
                    "or ask for shorter lengths."
                )
            high = self.most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def sample(self, tokenizer: Tokenizer, length: int, units: int, depth: float | None, seed: str) -> Sample:
        """Return a sample of at most ``length`` tokens, with fewer units if its key and number have more tokens."""
        while True:
            sample = self.build(units, depth, random.Random(seed))
            if len(tokenizer.encode(sample.prompt)) + 1 + NEW_TOKENS[self.task] <= length or units == 1:
                return sample
            units -= 1


def haystack(task: str, texts: Sequence[str] = ()) -> Haystack:
    """Return the haystack of a task; ``texts`` are for ``niah_single_2`` only.

    Raises:
        ValueError: the task is unknown, or texts are missing or not used by it.
    """
    if task not in NEW_TOKENS:
        raise ValueError(unknown_name("task", task, NEW_TOKENS))
    if bool(texts) != (task == "niah_single_2"):
        needs = "needs texts (essays, books) to hide its needle in" if not texts else "makes its own text, so none"
        raise ValueError(f"{task} {needs}; got {len(texts)} texts.")
    if task == "passkey":
        return Haystack(task, _passkey, None)
    if task == "niah_single_1":
        return Haystack(task, _noise, None)
    words = re.sub(r"\s+", " ", " ".join(texts)).strip().split(" ")
    return Haystack(task, lambda units, depth, rng: _essay(words[:units], depth, rng), len(words))


def ruler_depth(rng: random.Random) -> float:
    """Draw one of RULER's 40 depths for essays."""
    return round(100 * rng.randrange(_DEPTHS_OF_RULER) / (_DEPTHS_OF_RULER - 1)) / 100


def _passkey(units: int, depth: float | None, rng: random.Random) -> Sample:
    """Return ``units`` characters of noise with the needle after the fraction ``depth``, or after a random number."""
    noise = " ".join([NOISE] * (units // len(NOISE) + 1))
    before = rng.randint(0, units) if depth is None else round(units * depth)
    value = str(rng.randint(1, 50_000))
    return Sample(PASSKEY.format(before=noise[:before], after=noise[: units - before], value=value), value)


def _noise(units: int, depth: float | None, rng: random.Random) -> Sample:
    """Return ``units`` lines of noise with the needle. As in RULER, a drawn place is never after the last line."""
    place = rng.randrange(units) if depth is None else round(units * depth)
    return _asked([NOISE] * units, place, "\n", rng)


def _essay(words: Sequence[str], depth: float | None, rng: random.Random) -> Sample:
    """Return words of the texts with the needle between two sentences."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    place = int(len(sentences) * (ruler_depth(rng) if depth is None else depth))
    return _asked(sentences, place, " ", rng)


def _asked(units: list[str], place: int, separator: str, rng: random.Random) -> Sample:
    key, value = _key(rng), str(rng.randint(1_000_000, 9_999_999))
    needle = NEEDLE.format(key=key, value=value)
    context = separator.join([*units[:place], needle, *units[place:]])
    return Sample(QUESTION.format(context=context, key=key), value)


def _key(rng: random.Random) -> str:
    """Draw an adjective and a noun from the list of RULER's keys."""
    words = _words()
    return f"{rng.choice(words['adjectives'])}-{rng.choice(words['nouns'])}"


@cache
def _words() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = require("wonderwords", "eval").RandomWord()._categories
    return categories


DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
RANDOM = "random"


@dataclass(frozen=True)
class NeedleGrid:
    lengths: Sequence[int]
    """Lengths in tokens, including document start, prompt and answer."""
    depths: Sequence[float] | None = DEPTHS
    """Fractions of the haystack before the needle. None: drawn per sample as in the original test (before a random line
    of noise; at one of RULER's 40 depths in essays; before a random character of the passkey's noise or at its end)."""
    samples: int = 20
    """Samples per length and depth."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.samples < 1:
            raise ValueError(
                f"a grid needs lengths and samples of at least 1; got {list(self.lengths)} and {self.samples}."
            )
        if self.depths is not None and not (self.depths and all(0 <= depth <= 1 for depth in self.depths)):
            raise ValueError(
                f"depths must be shares in 0..1, from the start of the haystack to its end; got {list(self.depths)}."
            )


def retrieval(
    model: ScoredModel[Any], task: str, grid: NeedleGrid, *, texts: Sequence[Text] = (), seed: int = 0,
    report: Report = quiet,
) -> Results:  # fmt: skip
    """Measure how often the greedy answer contains the hidden number, for every length and depth.

    Args:
        task: ``passkey``, ``niah_single_1``, or ``niah_single_2``, which hides the needle in ``texts``.

    Raises:
        ValueError: the task is unknown, a length is too small for it, or the texts are too short for a length.
    """
    hay = haystack(task, [text.whole() for text in texts])
    scores, notes, answers = [], [], []
    for length in grid.lengths:
        units = hay.fit(model.tokenizer, length)
        for depth in [None] if grid.depths is None else grid.depths:
            report(f"length {length:,}, depth {RANDOM if depth is None else depth}")
            found = [
                _ask(model, hay, length, units, depth, f"{seed} {length} {depth} {i}") for i in range(grid.samples)
            ]
            where = {"task": task, "length": length, "depth": RANDOM if depth is None else depth}
            scores += _scores(found, where)
            notes += _empty(found, where)
            answers += [where | {"expected": answer, "tokens": tokens, "got": got} for answer, got, tokens in found]
    settings = {
        "task": task, "texts": [text.name for text in texts], "lengths": list(grid.lengths),
        "depths": RANDOM if grid.depths is None else list(grid.depths), "samples": grid.samples,
        "new_tokens": NEW_TOKENS[task],
    }  # fmt: skip
    return Results("retrieval", scores, settings, seed, notes, {"words": hay.most, "answers": answers})


def _ask(
    model: ScoredModel[Any], hay: Haystack, length: int, units: int, depth: float | None, seed: str
) -> tuple[str, str, int]:
    """Return the expected answer, the model's answer, and the number of prompt tokens."""
    sample = hay.sample(model.tokenizer, length, units, depth, seed)
    tokens = document_ids(model.tokenizer, sample.prompt)
    return sample.answer, model.write(model.read(tokens), NEW_TOKENS[hay.task]), len(tokens)


def _scores(found: Sequence[tuple[str, str, int]], where: dict[str, Any]) -> list[Score]:
    """Return RULER's score; for the passkey also the score of the original test, on the first number only."""
    rules = {"string_match_all": [string_match_all(got, [answer]) == 1 for answer, got, _ in found]}
    if where["task"] == "passkey":
        rules["first number"] = [first_number(got) == int(answer) for answer, got, _ in found]
    scores = []
    for name, hits in rules.items():
        value, interval = share(hits)
        scores.append(Score(name, value, len(hits), "samples", interval, where))
    return scores


def _empty(found: Sequence[tuple[str, str, int]], where: dict[str, Any]) -> list[str]:
    empty = sum(not got.strip() for _, got, _ in found)
    place = f"length {where['length']:,}, depth {where['depth']}"
    return [f"{place}: {empty} of {len(found)} answers are empty, and count as wrong"] if empty else []


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the fraction of references that the prediction contains, ignoring case."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    return sum(reference.lower() in cleaned for reference in references) / len(references)


def first_number(prediction: str) -> int | None:
    """Return the first number in the prediction; None if there is none."""
    found = re.search(r"\d+", prediction)
    return int(found[0]) if found else None
