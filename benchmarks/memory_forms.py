"""Other forms of the working memory: recall, loss on books, and loss in a text of 4 M bytes, against the paper's form.

``benchmarks/evidence.py --write`` makes results/evidence/memory_forms/README.md of the results. This script trained the
forms until 02a1795; ``capacity.py`` has those of them that are of use, and measures recall over a whole grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kept
import numpy as np
from diagnostics import beyond_window
from measuring import table

from gecko.eval.results import bootstrap_mean
from gecko.experiments.rows import grouped

FOLDER = kept.FOLDER / "memory_forms"
LENGTHS = "memory_forms/lengths"
LONG = 2**22

FORMS = (
    "keys of 1 (paper)", "keys of 1, learned temperature", "keys of 5.66", "keys of 11.31",
    "keys of 11.31, forgetting 1/16", "keys of 11.31, forgetting 1/256", "keys of 11.31, scaled read",
    "keys of 11.31, gated read", "no memory",
)  # fmt: skip
"""The first is the reference."""


def page() -> str:
    """Return the results as a Markdown table."""
    lengths = grouped(kept.read(LENGTHS)["scores"], lambda score: score["where"]["form"])
    rows = []
    for name in FORMS:
        seeds = grouped(lengths.get(name, []), lambda score: score["where"]["seed"]).values()
        values = [[score["value"] for score in seed] for seed in seeds]
        recalled = [f"{value:.3f}" for value in differences(name)["recall"]]
        novels = [_novels(record, first) for record, first in _with_first(name)]
        gibbon = [f"{_at_end(record):.4f}" if first is None else f"{_at_end(record) - _at_end(first):+.4f}"
                  for record, first in _with_first(name)]  # fmt: skip
        ends = [f"{min(one):.1f} to {max(one):.1f}" for one in values]
        rows.append((name, *("; ".join(shown) or "not run" for shown in (recalled, novels, gibbon, ends))))
    return "\n\n".join([
        "# Other forms of the working memory",
        "Made by `python benchmarks/evidence.py --write` of `../scores.csv.xz` and `../rows.csv.xz`. Recall: 16 "
        "pairs in rows of 256 tokens, one layer, as in `diagnose/README.md`, share of right answers 2 and more chunks"
        " away by seed. Novels: 1 M parameters, 10 MB, products in bfloat16, loss on 768 held-out rows (nats per "
        "byte, 95 % over rows). Gibbon: loss on bytes 2 M to 4 M of one text that is read from its start. Both by "
        "seed: for the first form the loss, for the others the difference to it with the same seed. Keys: least and "
        "greatest length of the memory's keys by layer and head, after the training on novels.",
        table(["form", "recall|>", "novels|>", "Gibbon|>", "keys|>"], rows),
        "Commands, at the commits named:",
        "\n".join(_commands()) + "\n",
    ])  # fmt: skip


def _records(task: str, name: str) -> dict[int, dict[str, Any]]:
    """Return the results of a form by seed."""
    names = {seed: f"memory_forms/{task}-{FORMS.index(name)}-{seed}" for seed in range(10)}
    known = kept.names("memory_forms")
    return {seed: kept.read(result) for seed, result in names.items() if result in known}


def _with_first(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield the results on books and those of the first form with the same seed; None if the form is the first."""
    first = _records("books", FORMS[0])
    for seed, record in _records("books", name).items():
        if seed in first:
            yield record, None if first[seed] == record else first[seed]


def differences(name: str) -> dict[str, list[float]]:
    """Return by seed the recall of a form, and its losses on novels and Gibbon minus those of the first form."""
    pairs = [(record, first) for record, first in _with_first(name) if first is not None]
    return {
        "recall": [beyond_window(record) for record in _records("recall", name).values()],
        "novels": [float(np.subtract(record["rows"], first["rows"]).mean()) for record, first in pairs],
        "Gibbon": [_at_end(record) - _at_end(first) for record, first in pairs],
    }


def _novels(record: dict[str, Any], first: dict[str, Any] | None) -> str:
    if first is None:
        return f"{record['scores'][0]['value']:.4f}"
    rows = np.subtract(record["rows"], first["rows"])
    interval = bootstrap_mean(rows, "rows", 0)
    return f"{rows.mean():+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _at_end(record: dict[str, Any]) -> float:
    return float(next(one["value"] for one in record["scores"][1:] if one["where"]["until"] == LONG))


def _commands() -> Iterator[str]:
    """Yield a command for each task, with the seeds and commits of its results."""
    for task in ("recall", "books"):
        found = [(seed, record["commit"][:7]) for name in FORMS for seed, record in _records(task, name).items()]
        if found:
            seeds, commits = (sorted(set(values)) for values in zip(*found, strict=True))
            yield (
                f"- `python benchmarks/memory_forms.py train --tasks {task} --seeds {','.join(map(str, seeds))}` "
                f"({', '.join(commits)})"
            )
