"""Does a learning rate that was found at one width serve wider models? A sweep with and without ``base_width``.

    python benchmarks/rates.py --out runs/rates             # the same command continues after an interruption
    python benchmarks/rates.py --out runs/rates --write     # and writes benchmarks/results/rates.md
    python benchmarks/rates.py --out runs/rates --widths 64 128

Models like ``tiny`` at several widths, all of whose dimensions grow with the width, are trained by AdamW and Muon at
rates that are a factor of 2 apart. The page shows the held-out loss of each, and what the rate that is best at the
first width costs at the others: the difference to the best loss of the same width over both ways to set the rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from measuring import parsed, parser_of, publish, table, trained_loss

from gecko.recipes import get_recipe
from gecko.train import CheckpointSettings, EvaluationSettings, Run, SampleSettings, SkipSettings

WIDTHS = (64, 128, 256)
BASE = WIDTHS[0]
RATES = {name: (4e-3, 8e-3, 16e-3, 32e-3) for name in ("adamw", "muon")}
ROWS, LENGTH = 2, 256


@dataclass(frozen=True)
class Trial:
    optimizer: str
    width: int
    ruled: bool
    """Whether the rates follow the width, by ``base_width``."""
    rate: float

    def run(self, folder: Path, steps: int, seed: int) -> Run:
        """Return the run. ``tiny`` has width 128; its dimensions are scaled, and heads, chunks and modes stay."""
        tiny, times = get_recipe("tiny"), self.width / 128
        rule = "rule" if self.ruled else "same"
        name = f"{self.optimizer}-{self.width}-{rule}-{self.rate:g}-seed-{seed}"
        sizes = {name: int(getattr(tiny.model, name) * times) for name in ("key_dim", "value_dim", "ffn_dim")}
        optimizer = replace(
            tiny.optimizer, name=self.optimizer, learning_rate=self.rate, base_width=BASE if self.ruled else None
        )
        return replace(
            tiny, model=replace(tiny.model, model_dim=self.width, **sizes), output=str(folder / name),
            batch_size=ROWS, sequence_length=LENGTH, steps=steps, minutes=None, precision="float32", threads=1,
            seed=seed, optimizer=optimizer, evaluation=EvaluationSettings(10**6, 1, 128),
            checkpoint=CheckpointSettings(every=10**6), sample=SampleSettings(tokens=0), skip=SkipSettings(None),
        )  # fmt: skip


def ways(width: int) -> tuple[bool, ...]:
    """Return with and without the rule; at the width for which the rates are given, it changes nothing."""
    return (False,) if width == BASE else (False, True)


def sections(losses: dict[Trial, float], widths: Sequence[int]) -> Iterator[str]:
    """Yield for each optimizer all losses, and what the best rate of the first width costs at the other widths."""
    for optimizer, rates in RATES.items():
        rows = []
        for width in widths:
            for ruled in ways(width):
                found = [losses[Trial(optimizer, width, ruled, rate)] for rate in rates]
                cells = (f"**{loss:.4f}**" if loss == min(found) else f"{loss:.4f}" for loss in found)
                rows.append((width, "rule" if ruled else "same", *cells))
        yield f"## {optimizer}"
        yield table(["width|d", "rates", *(f"{rate:g}|>" for rate in rates)], rows)
        best = min(rates, key=lambda rate: losses[Trial(optimizer, BASE, False, rate)])
        least = {width: min(loss for one, loss in losses.items() if (one.optimizer, one.width) == (optimizer, width))
                 for width in widths if width != BASE}  # fmt: skip
        costs = ((width, *(losses[Trial(optimizer, width, ruled, best)] - loss for ruled in (False, True)))
                 for width, loss in least.items())  # fmt: skip
        yield f"The best rate at width {BASE} is {best:g}. At the other widths it ends this far above their best:"
        yield table(["width|d", "same|.4f", "rule|.4f"], costs)


def main() -> None:
    parser = parser_of(
        __doc__, steps=(200, "of each run"), seeds=(1, "of each rate"),
        widths=(WIDTHS, f"multiples of 32, one of them {BASE}"),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    given = parsed(parser)
    trials = itertools.product(RATES, given.widths, (False, True), range(4))
    chosen = [Trial(name, width, ruled, RATES[name][i]) for name, width, ruled, i in trials if ruled in ways(width)]
    runs = {one: [one.run(given.out, given.steps, seed) for seed in range(given.seeds)] for one in chosen}
    losses = {one: fmean(map(trained_loss, of)) for one, of in runs.items()}
    publish(
        "rates.md", given, "Learning rates across widths", "",
        f"`tiny` at {len(given.widths)} widths; {given.steps} steps of {ROWS} rows of {LENGTH} bytes of Python's "
        "standard library, cosine schedule, float32, one thread. Held-out loss in nats per byte, the mean of "
        f"{given.seeds} seed{'s' * (given.seeds > 1)}. “Same” uses the rate for all parameters; “rule” sets "
        f"`optimizer.base_width={BASE}`.",
        *sections(losses, given.widths),
    )  # fmt: skip


if __name__ == "__main__":
    main()
