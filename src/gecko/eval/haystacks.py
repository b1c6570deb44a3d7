"""Texts that hide one number, with a question for it: passkey, and RULER's needle tasks of one needle.

Words, templates and units are those of RULER's ``niah_single_1`` (noise) and ``niah_single_2`` (essays, or whatever
texts are given), in their form for base models, and of the original passkey test. Every sample has its depth: how
much of the haystack stands before the needle. It is given, or drawn as the test itself draws it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gecko.config import unknown_name
from gecko.data import Tokenizer
from gecko.extras import require

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
"""Tokens of an answer, in the original tests; they are part of the length."""
_DEPTHS_OF_RULER = 40


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Haystack:
    """One task at one length.

    build: (units of haystack, depth in 0..1 or None: drawn, generator) to a sample.
    most: units that there are; None: any number.
    """

    task: str
    build: Callable[[int, float | None, random.Random], Sample]
    most: int | None

    def fit(self, tokenizer: Tokenizer, length: int) -> int:
        """The most units with which a sample, its answer and the document start have at most ``length`` tokens.

        Raises:
            ValueError: not even one fits, or the texts given are too short.
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
        """One that has at most ``length`` tokens; keys and numbers differ in theirs, so ``units`` may be a few less."""
        while True:
            sample = self.build(units, depth, random.Random(seed))
            if len(tokenizer.encode(sample.prompt)) + 1 + NEW_TOKENS[self.task] <= length or units == 1:
                return sample
            units -= 1


def haystack(task: str, texts: Sequence[str] = ()) -> Haystack:
    """The task of that name; ``texts`` are the haystack of ``niah_single_2``.

    Raises:
        ValueError: an unknown task, or texts missing or not wanted.
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
    """One of the 40 depths that RULER draws from for essays."""
    return round(100 * rng.randrange(_DEPTHS_OF_RULER) / (_DEPTHS_OF_RULER - 1)) / 100


def _passkey(units: int, depth: float | None, rng: random.Random) -> Sample:
    """``units`` characters of noise, of which a share of ``depth`` stands before the needle, or any number of them."""
    noise = " ".join([NOISE] * (units // len(NOISE) + 1))
    before = rng.randint(0, units) if depth is None else round(units * depth)
    value = str(rng.randint(1, 50_000))
    return Sample(PASSKEY.format(before=noise[:before], after=noise[: units - before], value=value), value)


def _noise(units: int, depth: float | None, rng: random.Random) -> Sample:
    """``units`` lines of noise; drawn, the needle stands before any of them, as RULER's, and never after the last."""
    place = rng.randrange(units) if depth is None else round(units * depth)
    return _asked([NOISE] * units, place, "\n", rng)


def _essay(words: Sequence[str], depth: float | None, rng: random.Random) -> Sample:
    """Words of texts; the needle stands between two of their sentences."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    place = int(len(sentences) * (ruler_depth(rng) if depth is None else depth))
    return _asked(sentences, place, " ", rng)


def _asked(units: list[str], place: int, separator: str, rng: random.Random) -> Sample:
    key, value = _key(rng), str(rng.randint(1_000_000, 9_999_999))
    needle = NEEDLE.format(key=key, value=value)
    context = separator.join([*units[:place], needle, *units[place:]])
    return Sample(QUESTION.format(context=context, key=key), value)


def _key(rng: random.Random) -> str:
    """An adjective and a noun of the list that RULER takes its keys from."""
    words = _words()
    return f"{rng.choice(words['adjectives'])}-{rng.choice(words['nouns'])}"


@cache
def _words() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = require("wonderwords", "eval").RandomWord()._categories
    return categories
