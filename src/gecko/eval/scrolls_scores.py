"""How SCROLLS scores answers: word F1, and the geometric mean of ROUGE-1, -2 and -L. All in percent."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gecko.eval.intervals import Values
from gecko.extras import require

ROUGE = ("rouge1", "rouge2", "rougeL")


def f1_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """(items,): F1 of the words of prediction and reference, without case, punctuation and articles; the best of an
    item's references counts.

    Raises:
        ValueError: an item without references.
    """
    _check(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return np.array([100 * max(_f1(prediction, one) for one in several) for prediction, several in pairs])


def rouge_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Values:
    """(3, items): F-measures of ROUGE-1, -2 and -L without stemming, for each the best of an item's references.

    Raises:
        ValueError: an item without references.
    """
    _check(predictions, references)
    scorer = require("rouge_score.rouge_scorer", "eval").RougeScorer(list(ROUGE), use_stemmer=False)
    found = []
    for prediction, several in zip(predictions, references, strict=True):
        scores = [scorer.score(one.strip(), prediction.strip()) for one in several]
        found.append([100 * max(score[name].fmeasure for score in scores) for name in ROUGE])
    return np.array(found).T


def geometric_mean(rouge1: Values, rouge2: Values, rouge_l: Values, axis: int = -1) -> Values:
    """Cube root of the product of the three corpus means, along the items' axis."""
    return np.cbrt(rouge1.mean(axis) * rouge2.mean(axis) * rouge_l.mean(axis))


def _f1(prediction: str, reference: str) -> float:
    got, wanted = _words(prediction), _words(reference)
    common = sum((Counter(got) & Counter(wanted)).values())
    return 2 * common / (len(got) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if len(predictions) != len(references):
        raise ValueError(f"every prediction needs its references; got {len(predictions)} and {len(references)}.")
    for place, several in enumerate(references):
        if not any(one.strip() for one in several):
            raise ValueError(f"item {place} must have an answer to compare with; it has none. Leave the item out.")
