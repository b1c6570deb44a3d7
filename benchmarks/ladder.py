"""From Megalodon to Gecko, one change a rung: a million parameters, 10 MB of novels, three seeds, four test novels.

Beside the ladder stand the two ends at four million parameters (two seeds), the Llama with its own initialisation and
with Gecko's, and other forms of Gecko.

    python benchmarks/ladder.py --books books --out runs/ladder --jobs 2           # train, score and write the table
    python benchmarks/ladder.py --books books --out runs/ladder --rates --jobs 2   # 2 MB at four rates for every rung

The same command continues after an interruption. Every ended run adds a line to ``results/evidence/ladder.csv`` (loss
by novel) or ``ladder_rates.csv``. ``books`` holds the novels as text files. Of a baseline's rates and initialisations
the tuning novels choose one by the seeds that all have: the others need only the first seed.

**Splits.** ``TEST`` novels are in no other split; no model and no setting of this ladder was chosen by them. ``TUNING``
novels choose the learning rates. Training uses the rest, without Gibbon, who is kept for long texts.

**Margin**, stated before the first run: a rung changes the loss if the 95 % interval over seeds and novels of the
paired difference does not contain 0; it matters if the whole interval is beyond ±0.005 nats per byte (``MARGIN``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from scipy import stats
from tables import RESULTS, Table, code_and_machine, rows_of, wider
from torch import nn

from gecko.layers.linear import embedding_, linear
from gecko.models import LanguageModel, Llama, build_model, load_any
from gecko.recipes import get_recipe

TEST = ("emma", "jane_eyre", "little_women", "north_and_south")
TUNING = ("crime_and_punishment", "pride_and_prejudice", "sherlock_holmes", "tale_of_two_cities")
KEPT_BACK = "gibbon"
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
LENGTH, ROWS, BATCH = 2048, 256, 8
"""Bytes of a scored row, rows of each novel (evenly spaced), and rows of a forward pass."""

BEGIN, END = "<!-- benchmarks/ladder.py -->\n", "<!-- end ladder -->\n"
"""Marks of the ladder's table in docs/evidence.md, which ``benchmarks/evidence.py --write`` renews."""
MARGIN = 0.005
"""Nats per byte that a difference must exceed to matter."""

CHANGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megalodon, ungated", ("model.swiglu=false", "model.ffn_dim=384")),
    ("+ SwiGLU", ("model.swiglu=true", "model.ffn_dim=256")),
    ("+ plain residual", ("model.two_hop_residual=false",)),
    ("+ identity skip", ("model.cema_skip=identity",)),
    ("+ timestep decay norm", ("model.timestep_betas=[0.999,0.9999]",)),
    ("+ rotary base 500,000", ("model.rope_base=500000",)),
    ("+ sliding chunks of 64", ("model.attention=sliding_chunk", "model.chunk_size=64")),
    ("+ working memory = Gecko", ("model.memory=adaptive",)),
)
"""Each rung has the changes of all rungs above it. In all of them a query attends to at most 128 bytes."""
GATED, GECKO = CHANGES[1][0], CHANGES[-1][0]
SLOWER = "Megalodon with SwiGLU, half the learning rate"
GATED_4M, GECKO_4M = "Megalodon with SwiGLU, 4 M", "Gecko, 4 M"
SLOWER_4M = "Megalodon with SwiGLU, 4 M, half the learning rate"


@dataclass(frozen=True)
class Model:
    """A recipe with overrides and a learning rate; ``base`` names the model that its loss is compared with."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    base: str = ""
    rate: float = 8e-3
    seeds: int = 3
    gecko_start: bool = False
    """Whether a Llama starts with weights of the distributions of Gecko's, not of transformers'."""


def _rungs() -> Iterator[Model]:
    overrides: tuple[str, ...] = ()
    for number, (name, added) in enumerate(CHANGES):
        overrides += added
        yield Model(name, "compare_megalodon", overrides, CHANGES[number - 1][0] if number else "")


def _llamas(name: str, recipe: str, base: str, rates: Sequence[float], seeds: int) -> tuple[Model, ...]:
    """Return Llamas at several rates, with their own initialisation and with Gecko's."""
    return tuple(
        Model(f"{name}{start}{f', rate {rate:g}' * (rate != 8e-3)}", recipe, (), base, rate, seeds, bool(start))
        for start in ("", ", Gecko's initialisation") for rate in rates
    )  # fmt: skip


RUNGS = tuple(_rungs())
LLAMAS = _llamas("Llama 2", "compare_llama", GECKO, (8e-3, 4e-3, 2e-3), 3)
LLAMAS_4M = _llamas("Llama 2, 4 M", "compare_llama_4m", GECKO_4M, (4e-3, 2e-3), 2)
BESIDE = (
    Model(GECKO_4M, "compare_gecko_4m", (), seeds=2),
    Model(GATED_4M, "compare_megalodon_4m", ("model.swiglu=true", "model.ffn_dim=512"), GECKO_4M, seeds=2),
    Model(SLOWER_4M, "compare_megalodon_4m", ("model.swiglu=true", "model.ffn_dim=512"), GECKO_4M, 4e-3, seeds=2),
    *LLAMAS_4M,
    Model(SLOWER, "compare_megalodon", RUNGS[1].overrides, GECKO, 4e-3),
    *LLAMAS,
    Model("Gecko, gate on attention and memory", "compare_gecko", ("model.gate=sum",), GECKO),
    Model("Gecko as the paper's text has it", "compare_paper", (), GECKO),
    Model("Gekko, the authors' later design", "compare_gekko", (), GECKO),
)
MODELS = {model.name: model for model in (*RUNGS, *BESIDE)}
FIRST = ((GECKO, GATED, CHANGES[0][0]), (GECKO_4M, GATED_4M))
"""Models that decide the sign of Gecko against either Megalodon are trained first, with all seeds."""
MEGALODON, LLAMA = "Megalodon as the paper has it, with SwiGLU", "Llama 2 at its best rate and initialisation"
BASELINES: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    (MEGALODON, "1 M"): ((GATED, SLOWER), GECKO),
    (MEGALODON, "4 M"): ((GATED_4M, SLOWER_4M), GECKO_4M),
    (LLAMA, "1 M"): (tuple(model.name for model in LLAMAS), GECKO),
    (LLAMA, "4 M"): (tuple(model.name for model in LLAMAS_4M), GECKO_4M),
}
"""By baseline and number of parameters: its models, of which the tuning novels choose one, and the Gecko."""


@dataclass(frozen=True)
class Planned:
    model: Model
    seed: int
    rate: float
    tuning: bool

    def folder(self, out: Path) -> Path:
        name = re.sub("[^a-z0-9.]+", "-", f"{self.model.name} {self.rate:g}".lower())
        return out / f"{'rate' if self.tuning else 'rung'}-{name.strip('-')}-seed-{self.seed}"

    def settings(self) -> list[str]:
        """Return the overrides of the recipe."""
        steps = ["steps=244"] if self.tuning else []
        overrides = [*self.model.overrides, *steps, f"optimizer.learning_rate={self.rate:g}", f"seed={self.seed}"]
        return [*overrides, "sample.tokens=0"]


def split_books(books: Path, out: Path) -> dict[str, Path]:
    """Make one folder of links a split; return the folders."""
    folders = {name: out / "books" / name for name in ("train", "tuning", "test")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(books.glob("*.txt")):
        split = "test" if path.stem in TEST else "tuning" if path.stem in TUNING else "train"
        link = folders[split] / path.name
        if not path.stem.startswith(KEPT_BACK) and not link.exists():
            link.symlink_to(path.resolve())
    return folders


def train(planned: Planned, out: Path, folders: dict[str, Path]) -> Path:
    """Train a run, or continue it; its held-out losses are of the tuning novels. Return its folder."""
    folder = planned.folder(out)
    start: list[str] = []
    if planned.model.gecko_start:
        weights = out / f"{folder.name}-start"
        llama_like_gecko(planned.model.recipe, planned.seed).save(weights)
        start = [f"init_from={weights}"]
    command = [
        sys.executable, "-m", "gecko", "train", planned.model.recipe, *planned.settings(),
        f"data.source={folders['train']}", f"data.validation={folders['tuning']}",
        f"evaluation.final_rows={768 if planned.tuning else 64}", *start, "--out", str(folder), "--resume",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


_ONE_SEED = Lock()
"""PyTorch's generator is shared by the threads."""


def llama_like_gecko(recipe: str, seed: int) -> Llama:
    """Return a new Llama with the initialisation of a new Gecko: of the embedding, the head and all linear layers."""
    with _ONE_SEED:
        torch.manual_seed(seed)
        model = build_model(get_recipe(recipe).model)
        assert isinstance(model, Llama)
        for layer in model.modules():
            if layer is model.lm_head or isinstance(layer, nn.Embedding):
                embedding_(layer.weight)
            elif isinstance(layer, nn.Linear):
                layer.weight = linear(layer.in_features, layer.out_features, bias=False).weight
        return model


@torch.inference_mode()
def score(model: LanguageModel, novel: Path) -> float:
    """Return the mean loss of evenly spaced rows of a novel, in nats per byte. Every row starts without a past."""
    text = torch.frombuffer(bytearray(novel.read_bytes()), dtype=torch.uint8).long()
    last = (len(text) - 1) // LENGTH
    places = [i * last // ROWS * LENGTH for i in range(ROWS)]
    rows = torch.stack([text[place : place + LENGTH + 1] for place in places])
    losses = [model.token_losses(part[:, :-1], part[:, 1:])[0] for part in rows.split(BATCH)]
    return float(torch.cat(losses).double().mean())


def run(planned: Planned, out: Path, folders: dict[str, Path], table: Table) -> None:
    where = code_and_machine()
    folder = train(planned, out, folders)
    tuned = json.loads((folder / "results.json").read_text(encoding="utf-8"))["nats_per_byte"]
    if planned.tuning:
        table.add(planned.model.name, planned.seed, f"{planned.rate:g}", f"{tuned:.5f}", *where)
        return
    model = load_any(folder).eval()
    losses = [f"{score(model, folders['test'] / f'{name}.txt'):.5f}" for name in TEST]
    size = sum(parameter.numel() for parameter in model.parameters())
    table.add(planned.model.name, planned.seed, f"{planned.rate:g}", size, *losses, f"{tuned:.5f}", *where)


def losses_of(name: str, columns: Sequence[str] = TEST) -> dict[int, list[float]]:
    """Return the losses of a model on the test novels, or those in other columns of the table, by seed."""
    return {
        int(row["seed"]): [float(row[column]) for column in columns]
        for row in rows_of("ladder.csv") if row["rung"] == name
    }  # fmt: skip


def tuned(names: Sequence[str]) -> str:
    """Return the model with the least loss on the tuning novels, by the seeds that all models which were run have.

    A model that was not run comes last.
    """
    found = {name: losses_of(name, ["tuning_novels"]) for name in names}
    ran = [name for name in names if found[name]]
    shared = set[int]().union(*found.values()).intersection(*(found[name].keys() for name in ran))
    return min(ran, key=lambda name: sum(found[name][seed][0] for seed in shared)) if shared else names[0]


def missing(names: Sequence[str], gecko: str) -> int:
    """Return how many runs a comparison lacks: the first seed of each model, all of the chosen one and of Gecko."""
    needed = {name: set(range(MODELS[name].seeds)) for name in (tuned(names), gecko)}
    needed = {name: {0} for name in names} | needed
    return sum(len(seeds - losses_of(name).keys()) for name, seeds in needed.items())


def contrast(name: str, base: str) -> tuple[float, float, float, int] | None:
    """Return a model's loss less that of ``base``, its 95 % interval over seeds or novels, and the number of seeds.

    None without a seed.
    """
    one, other = losses_of(name), losses_of(base)
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        return None
    return *wider([np.subtract(one[seed], other[seed]) for seed in seeds]), len(seeds)


def signs() -> tuple[int, int, float]:
    """Return in how many runs Gecko is ahead of the gated Megalodon of its size and seed, their number, and p.

    p is that of a two-sided sign test. A run is one pair: losses on the novels of one run are not independent.
    """
    ahead = []
    for megalodons, gecko in (models for (baseline, _), models in BASELINES.items() if baseline == MEGALODON):
        one, other = losses_of(tuned(megalodons)), losses_of(gecko)
        ahead += [np.mean(one[seed]) > np.mean(other[seed]) for seed in sorted(one.keys() & other.keys())]
    count = sum(map(bool, ahead))
    return count, len(ahead), float(stats.binomtest(count, len(ahead)).pvalue) if ahead else 1.0


def page() -> str:
    """Return Markdown tables: rungs, each beside the rung above; the others that were run beside Gecko; rates."""
    beside = [model for model in BESIDE if losses_of(model.name)]
    tables = [
        _table("rung", "change", RUNGS),
        *([_table("beside the ladder", "minus Gecko", beside)] if beside else []),
    ]
    return "\n".join(["![Change of the loss by rung](pictures/ladder_changes.svg)\n", *tables, _rates()])


def _rates() -> str:
    """Return the losses on the tuning novels after 2 MB by learning rate."""
    found = {(row["rung"], float(row["rate"])): float(row["tuning_novels"]) for row in rows_of("ladder_rates.csv")}
    lines = [
        f"| after 2 MB, learning rate | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        "|---|" + "---:|" * len(RATES),
    ]
    for name in dict.fromkeys(name for name, _ in found):
        losses = [found.get((name, rate)) for rate in RATES]
        lines.append(f"| {name} | {' | '.join('' if loss is None else f'{loss:.4f}' for loss in losses)} |")
    return "\n".join(lines) + "\n"


def _table(title: str, difference: str, models: Sequence[Model]) -> str:
    lines = [f"| {title} | seeds | nats per byte | {difference} | 95 % interval |", "|---|---:|---:|---:|---|"]
    for model in models:
        found, change = losses_of(model.name), contrast(model.name, model.base)
        shown = ("", "") if change is None else (f"{change[0]:+.4f}", f"{change[1]:+.4f} .. {change[2]:+.4f}")
        loss = f"{np.mean(list(found.values())):.4f}" if found else "not run"
        lines.append(f"| {model.name} | {len(found)} | {loss} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines) + "\n"


def plan(rates: bool) -> list[Planned]:
    if rates:
        models = *RUNGS, *(model for model in LLAMAS if model.rate == Model.rate)
        return [Planned(model, 0, rate, True) for model in models for rate in RATES]
    groups = (*FIRST, [name for name in MODELS if not any(name in group for group in FIRST)])
    ordered = [(MODELS[name], seed) for group in groups for seed in range(3) for name in group]
    return [Planned(model, seed, model.rate, False) for model, seed in ordered if seed < model.seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", action="store_true", help="tune the learning rates instead")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folders = split_books(given.books, given.out)
    if given.rates:
        table = Table(
            given.results / "ladder_rates.csv", ("rung", "seed", "rate", "tuning_novels", "commit", "processor")
        )
    else:
        columns = ("rung", "seed", "rate", "parameters", *TEST, "tuning_novels", "commit", "processor")
        table = Table(given.results / "ladder.csv", columns)
    ended = {(row["rung"], row["seed"], row["rate"]) for row in table.rows()}
    wanted = [one for one in plan(given.rates) if one.model.name in given.only]
    open_ = [one for one in wanted if (one.model.name, str(one.seed), f"{one.rate:g}") not in ended]
    with ThreadPoolExecutor(given.jobs) as pool:
        for future in [pool.submit(run, one, given.out, folders, table) for one in open_]:
            future.result()
    print(page())


if __name__ == "__main__":
    main()
