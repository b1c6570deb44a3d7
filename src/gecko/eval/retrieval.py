"""Retrieval from long texts by length and depth: the passkey, and the thirteen tasks of RULER.

The depth of a sample is the fraction of the haystack before the needle. It is given, or drawn as in the original test.
Tasks with several needles, variables, words or documents draw all places.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from gecko.data import Tokenizer, document_ids
from gecko.eval import ruler
from gecko.eval.results import Report, Results, Score, bootstrap_mean, check_task, quiet, share
from gecko.eval.ruler import NEEDLES, NEW_TOKENS, NOISE, READERS, Sample, Units
from gecko.eval.scored_model import ScoredModel, Text
from gecko.io.files import fitting, parse_json

PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.\n{before}\nThe pass key is {value}. Remember it. {value} is the pass key.\n"
    "{after}\nWhat is the pass key? The pass key is"
)
TASKS: dict[str, int] = {"passkey": 10, **NEW_TOKENS}
"""Tokens per answer in the original tests; they count towards the length."""
OF_TEXTS = tuple(name for name, needles in NEEDLES.items() if needles.among == "texts")
WITH_DEPTH = ("passkey", *(name for name, needles in NEEDLES.items() if needles.single))
"""Tasks with one needle, whose depth can be chosen."""
_EXAMPLE = 500
"""Largest number of tokens of the example before the question about variables."""


@dataclass(frozen=True)
class Haystack:
    """The samples of a task that fit into ``length`` tokens."""

    task: str
    tokenizer: Tokenizer
    length: int
    units: Units

    def fit(self) -> int:
        """Return the largest number of units with which document start, sample and answer fit.

        Raises:
            ValueError: not even the smallest sample fits, or all there is does not fill the length.
        """
        low, high, most = self.units.least, 2 * self.units.least, self.units.most
        if not self.fits(low):
            raise self._too_short()
        while (most is None or high <= most) and self.fits(high):
            low, high = high, 2 * high
        if most is not None and high > most:
            if self.fits(most):
                units = "documents" if self.task in READERS else "words"
                raise ValueError(
                    f"{self.task} must fill {self.length:,} tokens; its {most:,} {units} do not. Give more of them, if "
                    "they are yours, or ask for shorter lengths."
                )
            high = most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    def sample(self, units: int, depth: float | None, seed: str, number: int = 0) -> Sample:
        """Return a sample that fits, with fewer units if its words have more tokens than those of others.

        Raises:
            ValueError: the smallest form of this sample does not fit.
        """
        for count in range(units, self.units.least - 1, -1):
            sample = self.units.build(count, depth, random.Random(seed), number)
            if self._holds(sample):
                return sample
        raise self._too_short()

    def fits(self, units: int) -> bool:
        """Return whether a sample with that many units fits."""
        return self._holds(self.units.build(units, 0.5 if self.task in WITH_DEPTH else None, random.Random(0), 0))

    def _holds(self, sample: Sample) -> bool:
        return len(self.tokenizer.encode(sample.prompt)) + 1 + TASKS[self.task] <= self.length

    def _too_short(self) -> ValueError:
        return ValueError(
            f"a length must hold question, needle and an answer of {TASKS[self.task]} tokens; {self.length:,} tokens "
            f"do not hold those of {self.task}. Try a larger length."
        )


_FORMS = {"qa_1": "SQuAD's", "qa_2": "HotpotQA's"}


def units_by_length(task: str, tokenizer: Tokenizer, texts: Sequence[Text] = ()) -> Callable[[int], Units]:
    """Return the function from a length in tokens to the samples of a task; it reads ``texts`` once.

    Args:
        texts: those that needles are hidden in, or the file with the questions.

    Raises:
        ValueError: the task is unknown, texts are missing or not used by it, or a file has no questions.
    """
    check_task(task, TASKS)
    if bool(texts) != (task in OF_TEXTS or task in READERS):
        needs = "makes its own text, so none" if texts else "needs texts (essays, books) to hide its needle in"
        if task in READERS and not texts:
            needs = f"needs a file of questions in {_FORMS[task]} form"
        raise ValueError(f"{task} {needs}; got {len(texts)} texts.")
    if task == "cwe":  # RULER's short lists below 4,096 tokens. Bytes need them further: a word has more of them
        short, long = ruler.common_words(short=True), ruler.common_words(short=False)
        return lambda length: (
            long if length >= 4096 and Haystack(task, tokenizer, length, long).fits(long.least) else short
        )
    if task == "fwe":
        return lambda length: ruler.frequent_words(length - NEW_TOKENS[task])
    if task in READERS:
        if len(texts) != 1:
            raise ValueError(f"{task} takes one file of questions; got {len(texts)}.")
        (text,), what = texts, f"questions in {_FORMS[task]} form"
        asked, documents = fitting(text.name, what, lambda: READERS[task](parse_json(text.whole())))
        if not asked:
            raise ValueError(f"{text.name} must have a question that has an answer; it has none.")
        units = ruler.questions(asked, documents)
    elif task == "passkey":
        units = Units(_passkey)
    elif task == "vt":
        units = ruler.variables(lambda prompt: len(tokenizer.encode(prompt)) <= _EXAMPLE)
    else:
        units = NEEDLES[task].units(" ".join(one.whole() for one in texts).split())
    return lambda _: units


def _passkey(units: int, depth: float | None, rng: random.Random, number: int) -> Sample:
    """Return ``units`` characters of noise with the needle after the fraction ``depth``, or after a random number."""
    noise = " ".join([NOISE] * (units // len(NOISE) + 1))
    before = rng.randint(0, units) if depth is None else round(units * depth)
    value = str(rng.randint(1, 50_000))
    return Sample(PASSKEY.format(before=noise[:before], after=noise[: units - before], value=value), (value,))


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
    """Measure how much of the answer the model's greedy text contains, for every length and depth.

    Args:
        task: one of ``TASKS``.
        texts: haystack of a task in ``OF_TEXTS``; for ``qa_1`` one file in SQuAD's form, for ``qa_2`` in HotpotQA's.

    Raises:
        ValueError: the task is unknown or has no depth to choose, a length is too small for it, or the texts are too
            short for a length.
    """
    check_task(task, TASKS)
    if grid.depths is not None and task not in WITH_DEPTH:
        raise ValueError(f"{task} hides more than one needle, so its places are drawn; got depths. Leave them out.")
    units_of = units_by_length(task, model.tokenizer, texts)
    hays = [Haystack(task, model.tokenizer, length, units_of(length)) for length in grid.lengths]
    different = hays[-1].units.questions or grid.samples
    count = min(grid.samples, different)
    scores, answers, words = list[Score](), list[dict[str, Any]](), hays[-1].units.most
    notes = [f"{count} samples, one for each question"] if different < grid.samples else []

    def samples(hay: Haystack) -> Iterator[tuple[dict[str, Any], Iterable[Sample]]]:
        units = hay.fit()
        for depth in [None] if grid.depths is None else grid.depths:
            where = {"task": task, "length": hay.length, "depth": RANDOM if depth is None else depth}
            names = (f"{seed} {hay.length} {depth} {number}" for number in range(count))
            made = (hay.sample(units, depth, name, number) for number, name in enumerate(names))
            # A question that does not fit must not end the evaluation after others were answered.
            yield where, list(made) if task in READERS else made

    every = chain.from_iterable(map(samples, hays))
    for where, asked in list(every) if task in READERS else every:
        place, found = f"length {where['length']:,}, depth {where['depth']}", []
        report(place)
        for sample in asked:
            tokens = document_ids(model.tokenizer, sample.prompt)
            found.append((sample, model.write(model.read(tokens), TASKS[task])))
            answers.append(where | {"expected": list(sample.answers), "tokens": len(tokens), "got": found[-1][1]})
        scores += _scores(found, where, seed)
        if empty := sum(not got.strip() for _, got in found):
            notes.append(f"{place}: {empty} of {len(found)} answers are empty, and count as wrong")
    settings = {
        "task": task, "texts": [text.name for text in texts], "lengths": list(grid.lengths),
        "depths": RANDOM if grid.depths is None else list(grid.depths), "samples": grid.samples,
        "new_tokens": TASKS[task],
    }  # fmt: skip
    return Results("retrieval", scores, settings, seed, notes, {"words": words, "answers": answers})


def _scores(found: Sequence[tuple[Sample, str]], where: dict[str, Any], seed: int) -> list[Score]:
    """Return RULER's score; for the passkey also the score of the original test, on the first number only."""
    rule = "string_match_part" if found[0][0].one_suffices else "string_match_all"
    values = [matched(got, sample) for sample, got in found]
    if rule == "string_match_all" and len(found[0][0].answers) > 1:
        interval = bootstrap_mean(np.array(values), "samples", seed)
        return [Score(rule, sum(values) / len(values), len(values), "samples", interval, where)]
    rules = {rule: [value == 1 for value in values]}
    if where["task"] == "passkey":
        rules["first number"] = [first_number(got) == int(sample.answers[0]) for sample, got in found]
    shares = {name: share(hits) for name, hits in rules.items()}
    return [Score(name, value, len(found), "samples", interval, where) for name, (value, interval) in shares.items()]


def matched(prediction: str, sample: Sample) -> float:
    """Return the fraction of answers in the prediction, ignoring case; if one suffices, whether it has one of them."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    hits = [answer.lower() in cleaned for answer in sample.answers]
    return float(any(hits)) if sample.one_suffices else sum(hits) / len(hits)


def first_number(prediction: str) -> int | None:
    """Return the first number in the prediction; None if there is none."""
    found = re.search(r"\d+", prediction)
    return int(found[0]) if found else None
