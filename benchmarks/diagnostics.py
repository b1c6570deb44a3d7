"""Accuracy of the working memory alone, and of small models that are trained on synthetic tasks with it.

``benchmarks/evidence.py --write`` makes results/evidence/diagnose/README.md of the results. The models are trained by
the commands of ``gecko eval diagnose`` in results.csv; this script measured the operator alone until 02a1795.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kept

from gecko.eval.results import Interval, wilson

FOLDER = kept.FOLDER / "diagnose"
RESOLUTION = "diagnose/resolution"

# The operator alone.
RULES = ("adaptive", "linear")
KEY_DIMS = (8, 32, 128, 256)
LENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Euclidean lengths of a key; the keys of a new model have length 1 in every head of any width."""
TOKENS, CHUNK, PAIRS = 128, 16, 4

# Training.
COMMON = (
    "size.length=64", "size.vocab_size=32", "size.items=4", "size.noise=false", "model.vocab_size=32",
    "model.num_layers=1", "model.model_dim=64", "model.key_dim=32", "model.value_dim=64", "model.num_heads=1",
    "model.ffn_dim=128", "model.cema_modes=4", "model.chunk_size=8", "batch_size=32", "learning_rate=1e-2",
    "weight_decay=0", "steps=300", "test_rows=300",
)  # fmt: skip
"""One layer: what attention does not see can only come from the memory or CEMA."""
SEEDS = (0, 1, 2)
RATES = ("3e-2", "3e-3")
"""Additional learning rates, the same for all memories."""
FAR = 2
"""Distance in chunks between answer and question from which attention does not see the answer."""
LONG = "model.memory_key_length=5.66"
"""The square root of the key width."""
MEMORIES = (
    ("model.memory=adaptive",), ("model.memory=adaptive", LONG), ("model.memory=linear",),
    ("model.memory=linear", LONG), ("model.memory=none",),
)  # fmt: skip
LONGER = "model.memory_key_length=11.31"
HARDER = (
    (LONG, "size.noise=true"), (LONG, "size.items=8"), (LONG, "size.items=15"), (LONG, "size.length=256"),
    (LONG, "model.key_dim=8"), (LONG, "size.length=128"), (LONGER, "size.length=256"),
)  # fmt: skip
"""Harder cases, to find the limits."""
MANY = (
    "size.items=16", "size.length=256", "size.vocab_size=64", "model.vocab_size=64", "model.key_dim=64",
    "learning_rate=5e-3", "steps=1300",
)  # fmt: skip
"""Sixteen pairs in rows of 256 tokens."""
GROWING = "growth=0.77"
"""About 500 steps with four pairs, and 500 with eight."""
RECALLED = (("model.memory=adaptive", LONGER, GROWING), ("model.memory=adaptive", GROWING))
CONTROLS = (("model.memory=adaptive", LONGER), ("model.memory=linear", LONGER, GROWING), ("model.memory=none", GROWING))
"""Sixteen pairs without growth, and with other memories: one seed each."""


@dataclass(frozen=True)
class Case:
    task: str
    changes: tuple[str, ...]
    """Changes to ``COMMON``."""
    seed: int

    @property
    def name(self) -> str:
        settings = (change.removeprefix("model.").removeprefix("size.") for change in self.changes)
        return f"diagnose/{'-'.join([self.task, *settings, str(self.seed)]).replace('=', '-')}"


def cases() -> Iterator[Case]:
    """Yield the cases, the most informative ones first."""
    for seed in SEEDS:
        yield from (Case("mqar", changes, seed) for changes in MEMORIES)
    tried = {rate: [Case("mqar", (*changes, f"learning_rate={rate}"), 0) for changes in MEMORIES] for rate in RATES}
    yield from tried[RATES[0]]
    yield from (Case("mqar", ("model.memory=adaptive", *changes), 0) for changes in HARDER)
    yield from tried[RATES[1]]
    for memory in (MEMORIES[0], MEMORIES[2]):
        yield Case("mqar", (*memory, "steps=1200"), 0)
    for seed in SEEDS:
        yield from (Case("mqar", (*changes, *MANY), seed) for changes in RECALLED)
    yield from (Case("mqar", (*changes, *MANY), 0) for changes in CONTROLS)
    for task in ("selective_copying", "induction_heads"):
        for longer in ((), ("steps=1200",)):
            yield from (Case(task, (*changes, *longer), 0) for changes in (MEMORIES[0], MEMORIES[1], MEMORIES[-1]))


def page() -> str:
    """Return the results as Markdown tables."""
    lines = [
        "# Synthetic tasks, and what the memory tells apart",
        "",
        "Made by `python benchmarks/evidence.py --write` of `../scores.csv.gz`; `../results.csv` has commands, "
        "hardware and versions. Intervals: Wilson, 95 %, of the answers of the runs named; runs differ by more. The "
        "trained models are of commits before 27 November 2026, when PyTorch cut the seeds of rows to 32 bits: seeds "
        "differ in the first weights alone, and without growth most test rows stood in training too, among 30 times as "
        "many others.",
        "",
    ]
    if kept.has(RESOLUTION):
        lines += [*_resolution_lines(kept.read(RESOLUTION)), ""]
    lines += _training_lines()
    return "\n".join(lines) + "\n"


def _resolution_lines(record: dict[str, Any]) -> Iterator[str]:
    n = record["scores"][0]["n"]
    yield "## The operator alone"
    yield ""
    yield (
        f"{PAIRS} of the first {CHUNK} tokens are asked for {TOKENS // CHUNK - 1} chunks later, by queries equal to "
        f"their keys; all other tokens are noise, all keys have random directions. Share of queries that read most of "
        f"the right one of the {PAIRS} values, guessing {1 / PAIRS:.2f}, n = {n:,} in each cell. In brackets how much "
        "what tokens read differs from token to token, in relation to its size. A new model's keys have length 1."
    )
    yield ""
    yield "| rule | key width | " + " | ".join(f"length {length:g}" for length in LENGTHS) + " |"
    yield "|---|---:|" + "---:|" * len(LENGTHS)
    found = {(*score["where"].values(), score["name"]): score for score in record["scores"]}
    for rule in RULES:
        for key_dim in KEY_DIMS:
            cells = []
            for length in LENGTHS:
                accuracy, spread = (found[rule, key_dim, length, name] for name in ("accuracy", "spread"))
                cells.append(f"{_share(round(n * accuracy['value']), n)} ({spread['value']:.2g})")
            yield f"| {rule} | {key_dim} | " + " | ".join(cells) + " |"


def _training_lines() -> Iterator[str]:
    yield "## Trained from scratch"
    yield ""
    yield f"`gecko eval diagnose TASK {' '.join(COMMON)}`"
    yield ""
    yield f"| task | changes | seeds | 0 or 1 chunks away | {FAR} or more chunks away | n | guessing |"
    yield "|---|---|---|---:|---:|---:|---:|"
    groups: dict[tuple[str, tuple[str, ...]], list[Case]] = {}
    for case in cases():
        groups.setdefault((case.task, case.changes), []).append(case)
    for (task, changes), members in groups.items():
        done = [case for case in members if kept.has(case.name)]
        names = f"{task} | {', '.join(changes)}"
        if not done:
            yield f"| {names} | not run | | | | |"
            continue
        records = [kept.read(case.name) for case in done]
        near, far = (_pooled(records, is_far) for is_far in (False, True))
        seeds = ", ".join(str(case.seed) for case in done)
        n = f"{near[1]:,} and {far[1]:,}"
        guessing = records[0]["settings"]["guessing"]
        yield f"| {names} | {seeds} | {_share(*near)} | {_share(*far)} | {n} | {guessing:.3f} |"


def _pooled(records: Sequence[dict[str, Any]], far: bool) -> tuple[int, int]:
    """Return the numbers of correct and of all answers, for questions that are far away or near."""
    hits = total = 0
    for record in records:
        for score in record["scores"]:
            (distance,) = score["where"].values()
            if distance != "any" and (distance >= FAR) is far:
                hits, total = hits + round(score["value"] * score["n"]), total + score["n"]
    return hits, total


def _share(hits: int, total: int) -> str:
    return "none" if total == 0 else _text(hits / total, wilson(hits, total))


def _text(value: float, interval: Interval) -> str:
    return f"{value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def beyond_window(record: Mapping[str, Any]) -> float:
    """Return the accuracy of questions 2 and more chunks after their pairs."""
    scores = [
        one for one in record["scores"] if str(one["where"]["chunks before the question"]) not in ("any", "0", "1")
    ]
    return sum(one["value"] * one["n"] for one in scores) / sum(one["n"] for one in scores)
