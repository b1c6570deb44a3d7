"""Accuracy of the working memory alone, and of small models that are trained on synthetic tasks with it.

``benchmarks/evidence.py --write`` makes results/evidence/diagnose/README.md of the results. The models are trained by
the commands of ``gecko eval diagnose`` in results.csv.xz, and are shown in their order; this script measured the
operator alone until 02a1795.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import kept
from measuring import table

from gecko.experiments.rows import grouped

FOLDER = kept.FOLDER / "diagnose"
RESOLUTION = "diagnose/resolution"
FAR = 2
"""Distance in chunks between answer and question from which attention does not see the answer."""


def page() -> str:
    """Return the results as Markdown tables."""
    return "\n\n".join([
        "# Synthetic tasks, and what the memory tells apart",
        "Made by `python benchmarks/evidence.py --write` of `../scores.csv.xz`; `../results.csv.xz` has commands, "
        "hardware and versions. Intervals: Wilson, 95 %, of the answers of the runs named; runs differ by more. The "
        "trained models are of commits before 27 November 2026, when PyTorch cut the seeds of rows to 32 bits: seeds "
        "differ in the first weights alone, and without growth most test rows stood in training too, among 30 times as "
        "many others.",
        *_operator_alone(kept.read(RESOLUTION)["scores"]),
        *_trained(),
    ]) + "\n"  # fmt: skip


def _operator_alone(scores: Sequence[dict[str, Any]]) -> list[str]:
    n = scores[0]["n"]
    cells = grouped(scores, lambda score: tuple(score["where"].values())).items()
    shown = {case: f"{kept.share(round(n * one['value']), n, 2)} ({two['value']:.2g})" for case, (one, two) in cells}
    rows = grouped(shown, lambda case: case[:2])
    lengths = [f"length {length:g}|>" for *_, length in next(iter(rows.values()))]
    return [
        "## The operator alone",
        "4 of the first 16 tokens are asked for 7 chunks later, by queries equal to their keys; all other tokens are "
        "noise, all keys have random directions. Share of queries that read most of the right one of the 4 values, "
        f"guessing 0.25, n = {n:,} in each cell. In brackets how much what tokens read differs from token to token, in "
        "relation to its size. A new model's keys have length 1.",
        table(["rule", "key width|d", *lengths], ((*of, *map(shown.get, cases)) for of, cases in rows.items())),
    ]


def _trained() -> list[str]:
    """Return the runs by task and by changes to the settings of the first run, of which its memory is a change too."""
    records = [kept.read(name) for name in kept.names("diagnose") if name != RESOLUTION]
    commands = [shlex.split(record["command"])[3:-3] for record in records]  # task and settings; not seed and device
    common = [setting for setting in commands[0][1:] if not setting.startswith("model.memory=")]
    runs = grouped(zip(commands, records, strict=True), lambda run: tuple(x for x in run[0] if x not in common))
    rows = []
    for (task, *changes), members in runs.items():
        of = [record for _, record in members]
        near, far = (_pooled(of, is_far) for is_far in (False, True))
        seeds, n = ", ".join(str(record["seed"]) for record in of), f"{near[1]:,} and {far[1]:,}"
        guessing = of[0]["settings"]["guessing"]
        rows.append((task, ", ".join(changes), seeds, kept.share(*near, 2), kept.share(*far, 2), n, guessing))
    places = "0 or 1 chunks away|>", f"{FAR} or more chunks away|>"
    columns = ["task", "changes", "seeds", *places, "n|>", "guessing|.3f"]
    return ["## Trained from scratch", f"`gecko eval diagnose TASK {' '.join(common)}`", table(columns, rows)]


def _pooled(records: Sequence[dict[str, Any]], far: bool) -> tuple[int, int]:
    """Return the numbers of correct and of all answers, for questions that are far away or near."""
    distances = [(score["where"]["chunks before the question"], score) for one in records for score in one["scores"]]
    return kept.pooled(score for distance, score in distances if distance != "any" and (distance >= FAR) is far)


def beyond_window(record: Mapping[str, Any]) -> float:
    """Return the accuracy of questions 2 and more chunks after their pairs."""
    place = "chunks before the question"
    scores = [one for one in record["scores"] if str(one["where"][place]) not in ("any", "0", "1")]
    return sum(one["value"] * one["n"] for one in scores) / sum(one["n"] for one in scores)
