"""Retrieval of one number from long texts, over a grid of lengths and depths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gecko.eval.haystacks import NEW_TOKENS, Haystack, haystack
from gecko.eval.intervals import share
from gecko.eval.results import Report, Results, Score, quiet
from gecko.eval.scored_model import ScoredModel, encode_document
from gecko.eval.texts import Text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
RANDOM = "random"


@dataclass(frozen=True)
class Grid:
    lengths: Sequence[int]
    """In tokens: document start, prompt and answer."""
    depths: Sequence[float] | None = DEPTHS
    """Shares of the haystack before the needle; None: drawn for every sample as the test itself does: before any line
    of noise, at one of RULER's 40 depths of essays, before any character of the passkey's noise or after it all."""
    samples: int = 20
    """For every length and depth."""

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
    model: ScoredModel[Any], task: str, grid: Grid, *, texts: Sequence[Text] = (), seed: int = 0,
    report: Report = quiet,
) -> Results:  # fmt: skip
    """Ask for the hidden number, greedily, and count by ``string_match_all``.

    Args:
        task: ``passkey``, ``niah_single_1``, or ``niah_single_2``, which hides the needle in ``texts``.

    Raises:
        ValueError: an unknown task, a length too small for it, or texts too short for a length.
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
    """Expected, got, and tokens of the prompt."""
    sample = hay.sample(model.tokenizer, length, units, depth, seed)
    tokens = encode_document(model.tokenizer, sample.prompt)
    return sample.answer, model.write(model.read(tokens), NEW_TOKENS[hay.task]), len(tokens)


def _scores(found: Sequence[tuple[str, str, int]], where: dict[str, Any]) -> list[Score]:
    """RULER's score, and for the passkey that of its first test, which looks at the first number only."""
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
    """Share of references that the prediction holds, whatever the case of letters."""
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip().lower()
    return sum(reference.lower() in cleaned for reference in references) / len(references)


def first_number(prediction: str) -> int | None:
    found = re.search(r"\d+", prediction)
    return int(found[0]) if found else None
