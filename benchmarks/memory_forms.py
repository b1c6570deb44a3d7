"""Other forms of the working memory: recall, loss on books, and loss in a text of 4 M bytes, against the paper's form.

    python benchmarks/memory_forms.py train         # every form on every task that has no result yet
    python benchmarks/memory_forms.py lengths       # lengths of the keys of the models that were trained on books
    python benchmarks/memory_forms.py page          # results/evidence/memory_forms/README.md from the results

Each form differs from Gecko in one thing. They are not options of the model: this script replaces a class or function
of the package while it trains and scores. ``train`` continues interrupted runs, in ``runs/memory-forms``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import kept
import numpy as np
import torch
from diagnostics import COMMON, GROWING, MANY, beyond_window
from measuring import START, byte_tokens, find_model
from shipped_model import row_losses
from torch import Tensor, nn

import gecko
from gecko.config import GeckoConfig
from gecko.eval.diagnose import Diagnosis, diagnose
from gecko.eval.results import Results, Score, Values, bootstrap_mean
from gecko.experiments.table import grouped
from gecko.inference.prefill import inference
from gecko.layers.gated_attention import GatedAttention
from gecko.ops import working_memory
from gecko.ops.gates import gated
from gecko.ops.working_memory import WorkingMemoryState, chunked
from gecko.ops.working_memory.rules import Rule
from gecko.recipes import apply_overrides, get_recipe
from gecko.records import build
from gecko.runtime.process import keep_freed_memory
from gecko.train import train
from gecko.train.settings import set_fields

FOLDER = kept.FOLDER / "memory_forms"
LENGTHS = "memory_forms/lengths"
RUNS = Path("runs/memory-forms")
ROWS = 192
"""Rows of each held-out book that are scored."""
LONG, PIECE = 2**22, 2048


class LearnedTemperature(GatedAttention):
    """Multiplies the memory's queries and keys by exp(τ); τ is learned per head and is 0 at the start."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.log_temperature = nn.Parameter(torch.zeros(config.num_heads, 1, 1))

    def queries_and_keys(self, z: Tensor) -> tuple[Tensor, ...]:
        query, key, *memory = super().queries_and_keys(z)
        return query, key, *(x * self.log_temperature.exp() for x in memory)


class OtherRead(GatedAttention):
    """Combines attention and the memory's output in another way."""

    def combined(self, attended: Tensor, gate: Tensor, recalled: Tensor) -> Tensor:
        raise NotImplementedError

    def mix(self, projections: Any, v: Any, gate: Any, before: Any, segments: Any) -> Any:
        states = before.wait()
        recalled, memory = working_memory.working_memory(
            projections[2], projections[3], v, self.config.chunk_size, state=states.memory, segments=segments
        )
        attended, attention = self.attend(projections, v, states.attention, segments)
        return self.combined(attended, gate, recalled), attention, memory


class ScaledRead(OtherRead):
    """Multiplies the memory's output by a factor, which is learned per head and is 4 at the start."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.read_scale = nn.Parameter(torch.full((config.num_heads, 1, 1), 4.0))

    def combined(self, attended: Tensor, gate: Tensor, recalled: Tensor) -> Tensor:
        return gated(attended, gate, recalled * self.read_scale)


class GatedRead(OtherRead):
    """Multiplies the memory's output by the gate of attention."""

    def combined(self, attended: Tensor, gate: Tensor, recalled: Tensor) -> Tensor:
        return gated(attended + recalled, gate, None)


@dataclass(frozen=True)
class Form:
    mixer: type[GatedAttention] = GatedAttention
    floor: float | None = None
    """Smallest ρ, the share of a chunk that enters. None: w / z, as in paper Eq. 16."""
    model: Mapping[str, float | str] = field(default_factory=dict)
    """Changes of the config."""


_LONGER = {"memory_key_length": 11.31}
FORMS = {
    "keys of 1 (paper)": Form(),
    "keys of 1, learned temperature": Form(LearnedTemperature),
    "keys of 5.66": Form(model={"memory_key_length": 5.66}),
    "keys of 11.31": Form(model=_LONGER),
    "keys of 11.31, forgetting 1/16": Form(floor=1 / 16, model=_LONGER),
    "keys of 11.31, forgetting 1/256": Form(floor=1 / 256, model=_LONGER),
    "keys of 11.31, scaled read": Form(ScaledRead, model=_LONGER),
    "keys of 11.31, gated read": Form(GatedRead, model=_LONGER),
    "no memory": Form(model={"memory": "none"}),
}
"""Forms by name. The first is the reference."""


def forgetting_normalisers(floor: float) -> Callable[[Rule, WorkingMemoryState, Tensor, Tensor], Tensor]:
    """Return ``chunked.normalisers_of`` with z ← min(z + w, w / floor), so that ρ = w / z is at least ``floor``."""

    def normalisers_of(rule: Rule, state: WorkingMemoryState, weights: Tensor, resets: Tensor) -> Tensor:
        entering = torch.cat([state.previous.weight.unsqueeze(2), weights], dim=2)
        found = [state.normaliser]
        for w, reset in zip(entering.unbind(2), resets.unbind(1), strict=True):
            z = torch.where(reset[:, None, None], w, rule.accumulate(found[-1], w))
            empty = w <= rule.empty_weight / 2
            found.append(torch.where(empty, z, torch.minimum(z, w - math.log(floor))))
        return torch.stack(found, dim=2)

    return normalisers_of


@contextmanager
def built_with(form: Form) -> Iterator[None]:
    """Build, train and read models of this form. Forgetting memories have no kernels."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("gecko.models.gecko.GatedAttention", form.mixer))
        if form.floor is not None:
            stack.enter_context(mock.patch.object(chunked, "normalisers_of", forgetting_normalisers(form.floor)))
            stack.enter_context(mock.patch.object(working_memory, "_cpu_kernel_takes", lambda *_: False))
        yield


def recall(form: Form, seed: int) -> Results:
    """Train one layer to recall 16 pairs in rows of 256 tokens, and return its accuracy by distance in chunks."""
    values = dataclasses.asdict(Diagnosis(seed=seed))
    set_fields(values, [*COMMON, *MANY, GROWING, *(f"model.{key}={value}" for key, value in form.model.items())])
    return diagnose("mqar", build(Diagnosis, values, texts=True), torch.device("cpu"))


def books(name: str, form: Form, seed: int) -> Results:
    """Train on 10 MB of novels, and return the losses of held-out rows, and those of one long text by doublings."""
    overrides = [
        "data.source=books/train", "data.validation=books/held_out", "precision=bfloat16", f"seed={seed}",
        "sample.tokens=0", f"output={RUNS / f'{list(FORMS).index(name)}-{seed}'}",
        *(f"model.{key}={value}" for key, value in form.model.items()),
    ]  # fmt: skip
    run = apply_overrides(get_recipe("compare_gecko"), overrides)
    train(run, resume=True)
    model = gecko.load(find_model(run.output))
    held_out = np.array(row_losses(model, Path("books/held_out"), ROWS))
    far = long_losses(model, sorted(Path("books/gibbon").glob("*.txt")))
    scores = [Score("nats per byte, held out", float(held_out.mean()), len(held_out), "rows",
                    bootstrap_mean(held_out, "rows", seed))]  # fmt: skip
    scores += [
        Score("nats per byte, Gibbon", float(part.mean()), len(part), "pieces", bootstrap_mean(part, "pieces", seed),
              {"until": end}) for end, part in _doublings(far)
    ]  # fmt: skip
    return Results("memory_forms", scores, run.to_dict(), seed, details={"rows": held_out.tolist()})


def long_losses(model: gecko.Gecko, texts: Sequence[Path]) -> Values:
    """Return the loss of each piece of one text, read from start to end."""
    data = torch.cat(list(byte_tokens(texts, LONG)))[None]
    inputs, state, losses = torch.cat([START[None], data[:, :-1]], dim=1), None, []
    with inference(model):
        for begin in range(0, LONG, PIECE):
            part = slice(begin, begin + PIECE)
            found, state = model.token_losses(inputs[:, part], data[:, part], state=state)
            losses.append(float(found.mean()))
    return np.array(losses)


def _doublings(pieces: Values) -> Iterator[tuple[int, Values]]:
    """Yield the pieces of each doubling of the length from 64 K on, and its end in bytes."""
    end = 2**16
    while end <= LONG:
        yield end, pieces[end // 2 // PIECE : end // PIECE]
        end *= 2


def result_of(task: str, name: str, seed: int) -> str:
    return f"memory_forms/{task}-{list(FORMS).index(name)}-{seed}"


def train_all(tasks: Sequence[str], names: Sequence[str], seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    for seed in seeds:
        for task in tasks:
            for name in names:
                result, form = result_of(task, name, seed), FORMS[name]
                if result in kept.names("memory_forms"):
                    continue
                print(task, name, seed, flush=True)
                with built_with(form):
                    results = recall(form, seed) if task == "recall" else books(name, form, seed)
                command = (
                    f"python benchmarks/memory_forms.py train --tasks {task} --forms {shlex.quote(name)} --seeds {seed}"
                )
                kept.keep_results(result, results, command, {"name": name})


def key_lengths(model: gecko.Gecko) -> list[float]:
    """Return the length of the memory's keys by layer and head: (1 + γ) e^τ, root mean square over features."""
    found = []
    for block in model.blocks:
        mixer = block.mixer
        keys = (1 + mixer.scale[3].detach()).unflatten(0, (model.config.num_heads, -1))
        temperature = mixer.log_temperature.detach().exp().flatten() if isinstance(mixer, LearnedTemperature) else 1.0
        found += (keys.square().mean(1).sqrt() * temperature).tolist()
    return found


def measure_lengths() -> None:
    """Keep ``LENGTHS``: for each form and seed, the lengths of the keys after training on books."""
    scores: list[Score] = []
    for number, (name, form) in enumerate(FORMS.items()):
        for run in sorted(RUNS.glob(f"{number}-*")) if form.model.get("memory") != "none" else ():
            with built_with(form):
                lengths = key_lengths(gecko.load(find_model(run)))
            where = {"form": name, "seed": run.name.partition("-")[2]}
            scores += [Score("length of the memory's keys", length, 1, "heads", None, {**where, "head": head})
                       for head, length in enumerate(lengths)]  # fmt: skip
    kept.keep_results(LENGTHS, Results("memory_forms", scores, {}, 0), "python benchmarks/memory_forms.py lengths")


def page() -> str:
    """Return the results as a Markdown table."""
    lines = [
        "# Other forms of the working memory",
        "",
        "Made by `python benchmarks/memory_forms.py page` of `../scores.csv.gz` and `../rows.csv.gz`. Recall: 16 "
        "pairs in rows of 256 tokens, one layer, as in `diagnose/README.md`, share of right answers 2 and more chunks"
        " away by seed. Novels: 1 M parameters, 10 MB, products in bfloat16, loss on 768 held-out rows (nats per "
        "byte, 95 % over rows). Gibbon: loss on bytes 2 M to 4 M of one text that is read from its start. Both by "
        "seed: for the first form the loss, for the others the difference to it with the same seed. Keys: least and "
        "greatest length of the memory's keys by layer and head, after the training on novels.",
        "",
        "| form | recall | novels | Gibbon | keys |",
        "|---|---:|---:|---:|---:|",
    ]
    lengths = grouped(kept.read(LENGTHS)["scores"], lambda score: score["where"]["form"])
    for name in FORMS:
        seeds = grouped(lengths.get(name, []), lambda score: score["where"]["seed"]).values()
        values = [[score["value"] for score in seed] for seed in seeds]
        ends = [f"{min(one):.1f} to {max(one):.1f}" for one in values]
        shown = (_recalled(name), _novels(name), _gibbon(name), ends)
        lines.append(f"| {name} | {' | '.join('; '.join(one) or 'not run' for one in shown)} |")
    return "\n".join([*lines, "", "Commands:", "", *_commands()]) + "\n"


def _records(task: str, name: str) -> dict[int, dict[str, Any]]:
    """Return the results of a form by seed."""
    names = {seed: result_of(task, name, seed) for seed in range(10)}
    known = kept.names("memory_forms")
    return {seed: kept.read(result) for seed, result in names.items() if result in known}


def _with_first(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield the results on books and those of the first form with the same seed; None if the form is the first."""
    first = _records("books", next(iter(FORMS)))
    for seed, record in _records("books", name).items():
        if seed in first:
            yield record, None if first[seed] == record else first[seed]


def differences(name: str) -> dict[str, list[float]]:
    """Return by seed the recall of a form, and its losses on novels and Gibbon minus those of the first form."""
    pairs = [(record, first) for record, first in _with_first(name) if first is not None]
    return {
        "recall": [beyond_window(record) for record in _records("recall", name).values()],
        "novels": [float(_row_differences(*pair).mean()) for pair in pairs],
        "Gibbon": [_at_end(record) - _at_end(first) for record, first in pairs],
    }


def _row_differences(record: dict[str, Any], first: dict[str, Any]) -> Values:
    return np.array(record["rows"]) - np.array(first["rows"])


def _recalled(name: str) -> list[str]:
    return [f"{value:.3f}" for value in differences(name)["recall"]]


def _novels(name: str) -> list[str]:
    shown = []
    for record, first in _with_first(name):
        if first is None:
            shown.append(f"{record['scores'][0]['value']:.4f}")
            continue
        rows = _row_differences(record, first)
        interval = bootstrap_mean(rows, "rows", 0)
        shown.append(f"{rows.mean():+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]")
    return shown


def _gibbon(name: str) -> list[str]:
    return [
        f"{_at_end(record):.4f}" if first is None else f"{_at_end(record) - _at_end(first):+.4f}"
        for record, first in _with_first(name)
    ]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "lengths", "page"))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["recall", "books"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    arguments = parser.parse_args()
    if arguments.part == "train":
        train_all(arguments.tasks, arguments.forms, arguments.seeds)
    elif arguments.part == "lengths":
        measure_lengths()
    else:
        (FOLDER / "README.md").write_text(page(), encoding="utf-8")
        print(page())


if __name__ == "__main__":
    sys.exit(main())
