"""From Megalodon to Gecko, one change a rung: a million parameters, 10 MB of novels, three seeds, four test novels.

Beside the ladder stand the two ends at four million parameters (two seeds), the Llama with its own initialisation and
with Gecko's, and other forms of Gecko.

    python benchmarks/ladder.py --books books --out runs/ladder --jobs 2           # train, score and write the table
    python benchmarks/ladder.py --books books --out runs/ladder --rates --jobs 2   # 2 MB at five rates for every rung

The same command continues after an interruption. Every ended run adds a line to ``results/evidence/ladder.csv`` (loss
by novel) or ``ladder_rates.csv``: NaN if it diverged. ``books`` holds the novels as text files. Of a baseline's rates
and initialisations the tuning novels choose one: a setting that another one is ahead of by more than ``MARGIN``, by the
runs that both have, needs only the first seed.

**Splits.** ``TEST`` novels are in no other split; no model and no setting of this ladder was chosen by them. ``TUNING``
novels choose the learning rates. Training uses the rest, without Gibbon, who is kept for long texts.

**Margin**, stated before the first run: a rung changes the loss if the 95 % interval over seeds and novels of the
paired difference does not contain 0; it matters if the whole interval is beyond ±0.005 nats per byte (``MARGIN``).
**Which settings need all seeds**, and that a verdict is open while the chosen rate is an end of those that ran, was
stated on 27 November, after the runs of Gecko and Megalodon and before any of the Llama. The first runs had one setting
each, of the rates after 2 MB. An earlier rule of that day, which ``EARLIER`` has, is from after three seeds at 1 M: all
settings needed all seeds. When seed 0 of the Llama had a lower loss at each higher rate, a higher one was added at
either size, and 0.001 left out at 1 M.

**Two processors.** Only runs of one seed and one processor are compared. A seed that ran on several counts once: its
difference is the mean of theirs. On 29 November, after the runs, was added: two settings of a Llama that ran on
different processors are compared by their differences from the Gecko of the same seed and processor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from measuring import parser_of, size_of, table
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from tables import DEVICE, WHERE, Interval, Table, arguments, best, over_seeds_and_documents, rows_of, trained
from torch import nn

from gecko.layers import embedding_, linear
from gecko.models import LanguageModel, Llama, build_model, load_any
from gecko.recipes import get_recipe

TEST = ("emma", "jane_eyre", "little_women", "north_and_south")
TUNING = ("crime_and_punishment", "pride_and_prejudice", "sherlock_holmes", "tale_of_two_cities")
KEPT_BACK = "gibbon"
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
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
SLOWER, FASTER = (f"Megalodon with SwiGLU, {change} the learning rate" for change in ("half", "twice"))
GATED_4M, GECKO_4M = "Megalodon with SwiGLU, 4 M", "Gecko, 4 M"
SLOWEST_4M, SLOWER_4M, FASTER_4M = (
    f"{GATED_4M}, {change} the learning rate" for change in ("a quarter of", "half", "twice")
)


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
LLAMAS = _llamas("Llama 2", "compare_llama", GECKO, (1.6e-2, 8e-3, 4e-3, 2e-3), 3)
LLAMAS_4M = (
    *_llamas("Llama 2, 4 M", "compare_llama_4m", GECKO_4M, (8e-3, 4e-3, 2e-3, 1e-3), 2),
    # With Gecko's initialisation the highest of these rates was the best, so a higher one ran; without it 0.004 was.
    Model("Llama 2, 4 M, Gecko's initialisation, rate 0.016", "compare_llama_4m", (), GECKO_4M, 1.6e-2, 2, True),
)
BESIDE = (
    Model(GECKO_4M, "compare_gecko_4m", (), seeds=2),
    *(
        Model(name, "compare_megalodon_4m", ("model.swiglu=true", "model.ffn_dim=512"), GECKO_4M, rate, seeds=2)
        for name, rate in ((GATED_4M, 8e-3), (SLOWER_4M, 4e-3), (SLOWEST_4M, 2e-3), (FASTER_4M, 1.6e-2))
    ),
    *LLAMAS_4M,
    Model(SLOWER, "compare_megalodon", RUNGS[1].overrides, GECKO, 4e-3),
    Model(FASTER, "compare_megalodon", RUNGS[1].overrides, GECKO, 1.6e-2),
    *LLAMAS,
    Model("Gecko, gate on attention and memory", "compare_gecko", ("model.gate=sum",), GECKO),
    Model("Gecko as the paper's text has it", "compare_paper", (), GECKO),
    Model("Gekko, the authors' later design", "compare_gekko", (), GECKO),
)
MODELS = {model.name: model for model in (*RUNGS, *BESIDE)}
MEGALODON, LLAMA = "Megalodon as the paper has it, with SwiGLU", "Llama 2 at its best rate and initialisation"
BASELINES: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    (MEGALODON, "1 M"): ((GATED, SLOWER, FASTER), GECKO),
    (MEGALODON, "4 M"): ((GATED_4M, SLOWER_4M, SLOWEST_4M, FASTER_4M), GECKO_4M),
    (LLAMA, "1 M"): (tuple(model.name for model in LLAMAS), GECKO),
    (LLAMA, "4 M"): (tuple(model.name for model in LLAMAS_4M), GECKO_4M),
}
"""By baseline and number of parameters: its models, of which the tuning novels choose one, and the Gecko."""
EARLIER = {"1 M": ((GATED, SLOWER), GECKO), "4 M": ((GATED_4M, SLOWER_4M), GECKO_4M)}
"""Megalodons of the rule before today's: all settings need all seeds."""


COLUMNS = ("rung", "seed", "rate", "parameters", *TEST, "tuning_novels", *WHERE)
TUNING_COLUMNS = ("rung", "seed", "rate", "tuning_novels", *WHERE)


@dataclass(frozen=True)
class Planned:
    model: Model
    seed: int
    rate: float
    tuning: bool
    books: Path
    out: Path
    lines: ClassVar[int] = 1

    @property
    def key(self) -> tuple[str, ...]:
        return self.model.name, str(self.seed), f"{self.rate:g}"

    @property
    def folder(self) -> Path:
        name = re.sub("[^a-z0-9.]+", "-", f"{self.model.name} {self.rate:g}".lower())
        return self.out / f"{'rate' if self.tuning else 'rung'}-{name.strip('-')}-seed-{self.seed}"

    def settings(self) -> list[str]:
        """Return the overrides of the recipe. Held-out losses are of the tuning novels."""
        added = ["steps=244"] if self.tuning else []
        if DEVICE.type == "cuda" and get_recipe(self.model.recipe).model.chunk_size is not None:
            added.append("capture=true")  # as a Llama cannot be: it waits less for the host
        overrides = [*self.model.overrides, *added, f"optimizer.learning_rate={self.rate:g}", f"seed={self.seed}"]
        return [
            *overrides, "sample.tokens=0", f"data.source={self.books / 'train'}",
            f"data.validation={self.books / 'tuning'}", f"evaluation.final_rows={768 if self.tuning else 64}",
        ]  # fmt: skip


def split_books(books: Path, out: Path) -> Path:
    """Make one folder of links a split; return the folder of the three."""
    for path in sorted(books.glob("*.txt")):
        split = "test" if path.stem in TEST else "tuning" if path.stem in TUNING else "train"
        link = out / "books" / split / path.name
        if not path.stem.startswith(KEPT_BACK) and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    return out / "books"


def llama_like_gecko(recipe: str, seed: int) -> Llama:
    """Return a new Llama with the initialisation of a new Gecko: of the embedding, the head and all linear layers."""
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
    text = torch.frombuffer(bytearray(novel.read_bytes()), dtype=torch.uint8).long().to(DEVICE)
    last = (len(text) - 1) // LENGTH
    places = [i * last // ROWS * LENGTH for i in range(ROWS)]
    rows = torch.stack([text[place : place + LENGTH + 1] for place in places])
    losses = [model.token_losses(part[:, :-1], part[:, 1:])[0] for part in rows.split(BATCH)]
    return float(torch.cat(losses).double().mean())


def run(planned: Planned) -> list[tuple[object, ...]]:
    """Train and score a model; return its line of the table: NaN if training diverges."""
    folder, start = planned.folder, list[str]()
    if planned.model.gecko_start:
        weights = planned.out / f"{folder.name}-start"
        llama_like_gecko(planned.model.recipe, planned.seed).save(weights)
        start = [f"init_from={weights}"]
    checkpoint, where = trained(planned.model.recipe, [*planned.settings(), *start], folder)
    if checkpoint is None:
        return [(*planned.key, *[math.nan] * (1 if planned.tuning else len(TEST) + 2), *where)]
    tuned = json.loads((folder / "results.json").read_text(encoding="utf-8"))["nats_per_byte"]
    if planned.tuning:
        return [(*planned.key, f"{tuned:.5f}", *where)]
    model = load_any(folder).to(DEVICE).eval()
    losses = [f"{score(model, planned.books / 'test' / f'{name}.txt'):.5f}" for name in TEST]
    return [(*planned.key, size_of(model), *losses, f"{tuned:.5f}", *where)]


class Ran(NamedTuple):
    """Seed and processor of a run. Two runs are compared if both are equal."""

    seed: int
    processor: str


def losses_of(name: str, columns: Sequence[str] = TEST) -> dict[Ran, list[float]]:
    """Return the losses of a model on the test novels, or those in other columns of the table, by run."""
    return {
        Ran(int(row["seed"]), row["processor"]): [float(row[column]) for column in columns]
        for row in rows_of("ladder.csv") if row["rung"] == name
    }  # fmt: skip


def seeds_of(runs: Iterable[Ran]) -> list[int]:
    return sorted({run.seed for run in runs})


def _by_seed(values: Mapping[Ran, ArrayLike]) -> list[NDArray[np.float64]]:
    """Return the means over processors, by seed."""
    return [np.mean([x for run, x in values.items() if run.seed == seed], axis=0) for seed in seeds_of(values)]


def tuning_losses(names: Iterable[str]) -> tuple[list[int], dict[str, float]]:
    """Return the seeds of the runs that all models have which were run, and the mean loss of these runs on the tuning
    novels by model."""
    found = {name: losses for name in names if (losses := losses_of(name, ["tuning_novels"]))}
    runs = set.intersection(*map(set, found.values())) if found else set[Ran]()
    means = {name: float(np.mean(_by_seed({run: of[run] for run in runs}))) for name, of in found.items()}
    return seeds_of(runs), means if runs else {}


def contenders(names: Iterable[str]) -> list[str]:
    """Return the models that no other is ahead of on the tuning novels by more than the margin; of a model whose
    training diverged, nothing is.

    Two models are compared by the runs that both have. If no processor trained both, they are compared by seed, each
    less the Gecko of the same run.
    """
    tuning = ["tuning_novels"]
    found = {name: losses for name in names if (losses := losses_of(name, tuning))}
    found = {name: losses for name, losses in found.items() if np.isfinite([*losses.values()]).all()}

    def less_gecko(name: str) -> dict[Ran, NDArray[np.float64]]:
        pairs = _pairs(name, MODELS[name].base, tuning)
        return {Ran(seed, ""): mean for seed, mean in zip(seeds_of(pairs), _by_seed(pairs), strict=True)}

    def behind(one: str, other: str) -> float:
        apart = found[one].keys().isdisjoint(found[other])
        mine, its = (less_gecko(name) if apart else found[name] for name in (one, other))
        shared = {run: np.subtract(mine[run], its[run]) for run in mine if run in its}
        return float(np.mean(_by_seed(shared))) if shared else 0.0

    return [one for one in found if all(behind(one, other) <= MARGIN for other in found)]


def tuned(names: Iterable[str]) -> str | None:
    """Return the contender with the least loss on the tuning novels; None without a seed that all have."""
    return best(tuning_losses(contenders(names))[1])


def missing(names: Sequence[str], gecko: str) -> int:
    """Return how many runs a comparison lacks: the first seed of each model, all of each contender and of Gecko."""
    needed = {name: {0} for name in names}
    needed |= {name: set(range(MODELS[name].seeds)) for name in (*contenders(names), gecko)}
    return sum(len(seeds.difference(seeds_of(losses_of(name)))) for name, seeds in needed.items())


def end_of_rates(chosen: str, names: Sequence[str]) -> str:
    """Return which end of the rates that ran with the same initialisation a model's rate is; nothing if none."""
    own = MODELS[chosen]
    rates = [MODELS[name].rate for name in names if MODELS[name].gecko_start == own.gecko_start and losses_of(name)]
    return "upper" if own.rate == max(rates) else "lower" if own.rate == min(rates) else ""


class Contrast(NamedTuple):
    change: Interval
    seeds: int
    other_code: bool
    """Whether the two models of a pair are of different source code."""

    def shown(self) -> str:
        return self.change.shown() + "; pairs of different code" * self.other_code


def contrast(name: str, base: str) -> Contrast | None:
    """Return a model's loss less that of ``base``; None without a common seed."""
    pairs = _pairs(name, base)
    if not pairs:
        return None
    source = {(row["rung"], Ran(int(row["seed"]), row["processor"])): row["source"] for row in rows_of("ladder.csv")}
    differences = _by_seed(pairs)
    other_code = any(source[name, run] != source[base, run] for run in pairs)
    return Contrast(over_seeds_and_documents(differences), len(differences), other_code)


def _pairs(name: str, base: str, columns: Sequence[str] = TEST) -> dict[Ran, NDArray[np.float64]]:
    """Return the losses of a model less those of ``base``, by run."""
    one, other = losses_of(name, columns), losses_of(base, columns)
    return {run: np.subtract(one[run], other[run]) for run in one if run in other}


def signs() -> tuple[int, int, float]:
    """Return for how many seeds Gecko is ahead of the gated Megalodon of its size, their number, and p.

    p is that of a two-sided sign test. A seed is one pair: losses on the novels of one run are not independent.
    """
    ahead = []
    for megalodons, gecko in (models for (baseline, _), models in BASELINES.items() if baseline == MEGALODON):
        ahead += [np.mean(change) > 0 for change in _by_seed(_pairs(tuned(megalodons) or "", gecko))]
    count = sum(map(bool, ahead))
    return count, len(ahead), float(stats.binomtest(count, len(ahead)).pvalue) if ahead else 1.0


def page() -> str:
    """Return Markdown tables: rungs, each beside the rung above; the others that were run beside Gecko; rates.

    Settings of baselines that the tuning novels reject are a line.
    """
    rejected = {name for names, _ in BASELINES.values() for name in {*names} - {*contenders(names)}}
    ran = [model for model in BESIDE if losses_of(model.name)]
    beside = [model for model in ran if model.name not in rejected]
    others = [f"{model.name} {_mean(model.name):.4f}" for model in ran if model.name in rejected]
    tables = [
        _table("rung", "change in equal pairs", RUNGS),
        *([_table("beside the ladder", "minus Gecko", beside)] if beside else []),
        *([f"Settings that the tuning novels reject: {'; '.join(others)}.\n"] if others else []),
    ]
    return "\n".join(["![Change of the loss by rung](pictures/ladder_changes.svg)\n", *tables, _rates()])


def _mean(name: str) -> float:
    return float(np.mean(_by_seed(losses_of(name))))


def _rates() -> str:
    """Return a line with the losses on the tuning novels after 2 MB by learning rate."""
    found: dict[str, dict[float, str]] = {}
    for row in rows_of("ladder_rates.csv"):
        found.setdefault(row["rung"], {})[float(row["rate"])] = f"{float(row['tuning_novels']):.4f} at {row['rate']}"
    shown = (f"{name}: {', '.join(of[rate] for rate in sorted(of))}" for name, of in found.items())
    return f"After 2 MB, on the tuning novels, by learning rate: {'; '.join(shown)}.\n"


def _table(title: str, difference: str, models: Sequence[Model]) -> str:
    rows = []
    for model in models:
        found, change = losses_of(model.name), contrast(model.name, model.base)
        loss = _mean(model.name) if found else "not run"
        rows.append((model.name, len(seeds_of(found)), loss, "" if change is None else change.shown()))
    return table([title, "seeds|d", "nats per byte|.4f", f"{difference}, 95 % interval"], rows) + "\n"


def main() -> None:
    parser = parser_of(__doc__, write=False)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", action="store_true", help="tune the learning rates instead")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    given = arguments(parser)
    books = split_books(given.books, given.out)

    def planned(name: str, seed: int, rate: float) -> Planned:
        return Planned(MODELS[name], seed, rate, given.rates, books, given.out)

    def more_seeds() -> Iterator[Planned]:
        enough = {name for names, _ in BASELINES.values() for name in {*names} - {*contenders(names)}}
        for seed in (1, 2):
            for model in (MODELS[name] for name in given.only if name not in enough):
                if seed < model.seeds:
                    yield planned(model.name, seed, model.rate)

    if given.rates:
        rates = [planned(name, 0, rate) for name in given.only for rate in RATES]
        Table("ladder_rates.csv", TUNING_COLUMNS).work_through([lambda: rates], run, given.jobs)
    else:
        first = [planned(name, 0, MODELS[name].rate) for name in given.only]
        Table("ladder.csv", COLUMNS).work_through([lambda: first, more_seeds], run, given.jobs)
    print(page())


if __name__ == "__main__":
    main()
