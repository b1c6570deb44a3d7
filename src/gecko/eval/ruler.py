"""The prompts of RULER (Hsieh et al., 2024): needles, variables, frequent words, and questions about documents.

Words, templates, counts and lengths of answers are those of RULER, in its form for base models. Three things differ,
since nothing is downloaded: the essays are texts that the user names, sentences end at ``.``, ``!`` or ``?`` and a
space (RULER uses NLTK's Punkt), and ``cwe`` has only the words of wonderwords, about 8,000.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from gecko.data.readers import check_unicode
from gecko.runtime.process import require

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE_ASKED = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
SEVERAL_ASKED = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)
VARIABLES = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {count} variables are assigned the value {value}, they are: "
)
COMMON_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
FREQUENT_WORDS = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text? Answer: According to the coded text above, "
    "the three most frequently appeared words are:"
)
QUESTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {question} Answer:"
)
_DEPTHS = 40
_HOPS, _COMMON = 4, 10


class Sample(NamedTuple):
    """A prompt and its answers: the model's text should have all of them, or one if ``one_suffices``."""

    prompt: str
    answers: tuple[str, ...]
    one_suffices: bool = False


Build = Callable[[int, float | None, random.Random, int], Sample]
"""Function of units, fraction of the haystack before the needle (None: drawn), random numbers, and number of the
sample, which chooses its question."""


class Units(NamedTuple):
    """Samples of a task by size: the longest prompt has the most units (lines, words or documents) that fit."""

    build: Build
    least: int = 1
    most: int | None = None
    """None: unlimited."""
    questions: int | None = None
    """Number of different samples of one size, which follow each other; None: all samples differ."""


class Needles(NamedTuple):
    """Keys with values, hidden in noise, in texts, or among other needles."""

    among: str
    """``noise``, ``texts`` or ``needles``."""
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"

    @property
    def single(self) -> bool:
        return self.keys * self.values == 1

    def units(self, words: Sequence[str]) -> Units:
        most = len(words) if self.among == "texts" else None
        return Units(partial(self.sample, words), self.keys * self.values, most)

    def sample(
        self, words: Sequence[str], units: int, depth: float | None, rng: random.Random, number: int = 0
    ) -> Sample:
        key, value = _KINDS[self.key_kind], _KINDS[self.value_kind]
        hidden: dict[str, list[str]] = {}
        while len(hidden) < self.keys:
            hidden[key(rng)] = [value(rng) for _ in range(self.values)]
        needles = [self._needle(name, one) for name, values in hidden.items() for one in values]
        rng.shuffle(needles)
        if self.among == "texts":
            parts, separator = re.split(r"(?<=[.!?]) ", " ".join(words[:units])), " "
            shares = drawn_depths(len(needles), rng) if depth is None else [depth]
            places = [int(len(parts) * share) for share in sorted(shares)]
        else:
            parts, separator = [NOISE] * units, "\n"
            if self.among == "needles":
                parts = [self._needle(key(rng), value(rng)) for _ in range(units)]
            drawn = rng.sample(range(units), len(needles))
            places = sorted(drawn) if depth is None else [round(units * depth)]
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            parts.insert(place, needle)
        asked = rng.sample(list(hidden), self.asked)
        answers = tuple(one for name in asked for one in hidden[name])
        template, kind, query = SEVERAL_ASKED, self.value_kind, asked[0]
        if len(answers) == 1:
            template, kind = ONE_ASKED, kind.removesuffix("s")
        if len(asked) > 1:
            query = f"{', '.join(asked[:-1])}, and {asked[-1]}"
        return Sample(template.format(kind=kind, context=separator.join(parts), query=query), answers)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)


def drawn_depths(count: int, rng: random.Random) -> list[float]:
    """Draw different ones of RULER's 40 depths."""
    return [round(100 * step / (_DEPTHS - 1)) / 100 for step in rng.sample(range(_DEPTHS), count)]


@cache
def _words() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = require("wonderwords", "eval").RandomWord()._categories
    return categories


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{rng.choice(_words()['adjectives'])}-{rng.choice(_words()['nouns'])}",
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


def variables(fits: Callable[[str], bool]) -> Units:
    """Return chains of five variables in noise, after an example that is as long as it ``fits``."""
    lines = _HOPS + 1
    while fits(_chain(lines + 1, 3, random.Random(0)).prompt):
        lines += 1

    def build(units: int, _: float | None, rng: random.Random, number: int) -> Sample:
        shown, asked = _chain(lines, 3, rng), _chain(units, 5, rng)
        return Sample(f"{shown.prompt} {' '.join(shown.answers)}\n\n{asked.prompt}", asked.answers)

    return Units(build, least=_HOPS + 1)


def _chain(lines: int, letters: int, rng: random.Random) -> Sample:
    """Return noise with a chain of assignments to variables, whose names have a number of letters."""
    names: list[str] = []
    while len(names) <= _HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    value = str(rng.randint(10_000, 99_998))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {later} = VAR {earlier} " for earlier, later in pairwise(names)]
    noise = [NOISE] * lines
    for shift, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        noise.insert(place + shift, chain[shift])
    context = "\n".join(noise).replace(". \n", ".\n")
    return Sample(VARIABLES.format(context=context, value=value, count=len(names)), tuple(names))


def common_words(*, short: bool) -> Units:
    """Return numbered lists in which ten words are ten times as frequent as the rest, or six times in short ones."""
    words = sorted({word for kind in ("nouns", "adjectives", "verbs") for word in _words()[kind]})

    def build(units: int, _: float | None, rng: random.Random, number: int) -> Sample:
        shown = _numbered(rng, words, 20 if short else 40, (3, 1) if short else (10, 3))
        asked = _numbered(rng, words, units, (6, 1) if short else (30, 3))
        answers = " ".join(f"{number}. {word}" for number, word in enumerate(shown.answers, 1))
        return Sample(f"{shown.prompt} {answers}\n{asked.prompt}", asked.answers)

    return Units(build, least=_COMMON, most=len(words))


def _numbered(rng: random.Random, words: Sequence[str], count: int, repeats: tuple[int, int]) -> Sample:
    """Return a list of ``count`` words; the first ten occur ``repeats[0]`` times, the others ``repeats[1]`` times."""
    drawn = rng.sample(words, count)
    listed = drawn[:_COMMON] * repeats[0] + drawn[_COMMON:] * repeats[1]
    rng.shuffle(listed)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    return Sample(COMMON_WORDS.format(context=context), tuple(drawn[:_COMMON]))


def frequent_words(length: int) -> Units:
    """Return coded words whose frequency falls with the square of their rank; the most frequent one is dots."""
    kinds = max(4, length // 50)

    def build(units: int, _: float | None, rng: random.Random, number: int) -> Sample:
        coded: dict[str, None] = {}
        while len(coded) < kinds:
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        words = ["...", *list(coded)[1:]]
        counts = [int(units * rank**-2 / (math.pi**2 / 6)) for rank in range(1, kinds + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        rng.shuffle(text)
        return Sample(FREQUENT_WORDS.format(context=" ".join(text)), tuple(words[1:4]))

    return Units(build, least=100)  # with fewer words the third and the fourth may be equally frequent


class Asked(NamedTuple):
    """A question about documents, with numbers of those that answer it and of those that come before others."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    first: tuple[int, ...] = ()


def questions(asked: Sequence[Asked], documents: Sequence[str]) -> Units:
    """Return questions about documents, each with those that answer it among others."""

    def build(units: int, _: float | None, rng: random.Random, number: int) -> Sample:
        one = asked[number % len(asked)]
        before = {*one.needed, *one.first}
        rest = [place for place in range(len(documents)) if place not in before]
        room = units - len(one.needed)
        more = rng.sample(one.first, min(room, len(one.first)))
        chosen = [*one.needed, *more, *rng.sample(rest, room - len(more))]
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {place}:\n{documents[which]}" for place, which in enumerate(chosen, 1))
        return Sample(QUESTION.format(context=context, question=one.question), one.answers, one_suffices=True)

    return Units(build, max(len(one.needed) for one in asked), len(documents), len(asked))


def read_squad(found: Any) -> tuple[list[Asked], list[str]]:
    """Return the questions of SQuAD that have an answer, and its paragraphs."""
    articles = [[(_text(part["context"]), part["qas"]) for part in every["paragraphs"]] for every in found["data"]]
    documents = sorted({context for article in articles for context, _ in article})
    numbers = {document: number for number, document in enumerate(documents)}
    asked = []
    for article in articles:
        for context, every in article:
            others = tuple(dict.fromkeys(numbers[other] for other, _ in article if other != context))
            for one in (one for one in every if not one.get("is_impossible", False)):
                answers = tuple(_text(answer["text"]).strip() for answer in one["answers"])
                asked.append(Asked(_text(one["question"]), answers, (numbers[context],), others))
    return [one for one in asked if one.answers], documents


def read_hotpotqa(found: Any) -> tuple[list[Asked], list[str]]:
    """Return the questions of HotpotQA, and its paragraphs with their titles."""
    shown = [[_text(f"{title}\n{''.join(sentences)}") for title, sentences in one["context"]] for one in found]
    documents = sorted({document for every in shown for document in every})
    numbers = {document: number for number, document in enumerate(documents)}
    needed = (tuple(dict.fromkeys(numbers[document] for document in every)) for every in shown)
    pairs = zip(found, needed, strict=True)
    asked = [Asked(_text(one["question"]), (_text(one["answer"]).strip(),), its) for one, its in pairs]
    if empty := next((one.question for one in asked if not one.needed), None):
        raise ValueError(f"a question must have paragraphs that answer it; the context of {empty!r:.80} has none.")
    return asked, documents


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"questions, answers and documents must be text; got {value!r:.80}.")
    check_unicode(value, f"{value[:40]!a}")
    return value


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("texts"),
    "niah_single_3": Needles("texts", value_kind="uuids"),
    "niah_multikey_1": Needles("texts", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("texts", values=4),
    "niah_multiquery": Needles("texts", keys=4, asked=4),
}
READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}
NEW_TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50, **dict.fromkeys(READERS, 32)}
"""Tokens of an answer, which count towards the length."""
