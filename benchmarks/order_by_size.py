"""Loss of Gecko, Megalodon and Llama 2 by number of parameters, from the results of ``gecko compare``.

    python benchmarks/order_by_size.py    # README.md and loss-by-parameters.webp in results/evidence/comparison

Models are compared at equal bytes. The line of a model is the power law through its mean losses: loss = a · N⁻ᵇ, with N
the number of parameters.
"""

from __future__ import annotations

import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kept
from measuring import table
from PIL import Image

from gecko.experiments.compare.results import rows_of_comparison
from gecko.experiments.figures import grouped, loss_figure
from gecko.experiments.rows import HELD_OUT
from gecko.pages import LineStyle, label_line_ends, new_panels

FOLDER = kept.FOLDER / "comparison"
RESULTS = ("comparison/comparison", "comparison/longer", "comparison/order-")
"""Beginnings of the names of the comparisons of the three models, by ``gecko compare``."""
PICTURE = "loss-by-parameters.webp"
CURVES = {
    "loss-by-tokens.webp": ("comparison/comparison", "tokens", "bytes trained on"),
    "order-4m-30-loss-by-time.webp": ("comparison/order-4m-30", "minutes", "minutes in training steps"),
}  # fmt: skip
"""Pictures of the losses during training: result, place and its words."""
OTHERS = {"megalodon": "Megalodon, ungated", "llama": "Llama 2"}
"""Megalodon had no gate in its feed-forward in any of these files; it has one in ``compare_megalodon`` today."""
NAMES = {"gecko": "Gecko", **OTHERS}

Record = dict[str, Any]
Points = dict[str, list[tuple[int, float]]]
"""Parameters and loss of each run, by model."""


def records() -> list[Record]:
    """Return the comparisons, by bytes, size and seeds."""
    known = [name for name in kept.names("comparison") if name in RESULTS[:2] or name.startswith(RESULTS[2])]
    found = [kept.comparison(name) for name in known]
    return sorted(found, key=lambda record: (tokens_of(record), min(record["parameters"].values()), record["seeds"]))


def model_of(recipe: str) -> str:
    """Return the model's name in a recipe such as ``compare_gecko_4m``."""
    return recipe.split("_")[1]


def tokens_of(record: Record) -> int:
    return int(record["runs"][0]["tokens"])


def points_by_bytes() -> dict[int, Points]:
    found: dict[int, Points] = defaultdict(lambda: defaultdict(list))
    for record in records():
        for run in record["runs"]:
            found[tokens_of(record)][model_of(run["recipe"])].append((run["parameters"], run["nats_per_byte"]))
    return found


def power_law(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return a and b of loss = a · N⁻ᵇ through the means of at least two sizes, by least squares of logarithms."""
    by_size = grouped(points, lambda point: point[0])
    if len(by_size) < 2:
        return None
    means = [math.log(statistics.fmean(loss for _, loss in of)) for of in by_size.values()]
    slope, intercept = statistics.linear_regression([math.log(size) for size in by_size], means)
    return math.exp(intercept), -slope


def recipes_of(record: Record) -> dict[str, Record]:
    return {model_of(one["recipe"]): one for one in record["recipes"]}


def page() -> str:
    """Return the results as Markdown tables."""
    losses, times = [], []
    for record in records():
        recipes, sizes = recipes_of(record), record["parameters"].values()
        method = next(one["difference_interval"]["method"] for one in recipes.values() if one["difference_interval"])
        size = f"{min(sizes):,} to {max(sizes):,}"
        losses.append((
            tokens_of(record), size, record["settings"]["precision"], ", ".join(map(str, record["seeds"])),
            recipes["gecko"]["nats_per_byte"], *(_difference(recipes.get(name)) for name in OTHERS), method,
        ))  # fmt: skip
        minutes = defaultdict[str, list[float]](list)
        for run in record["runs"]:
            minutes[model_of(run["recipe"])].append(run["tokens"] / run["tokens_per_second"] / 60)
        means = [statistics.fmean(minutes[name]) if minutes[name] else None for name in NAMES]
        hardware = record["hardware"].get("GPU", record["hardware"]["Processor"].replace("(R)", ""))
        shown = ["not run" if one is None else f"{one:.{1 if one < 10 else 0}f}" for one in means]
        times.append((tokens_of(record), size, *shown, "; ".join([hardware, *record["notes"]])))
    return "\n\n".join([
        "# Gecko, Megalodon and Llama 2 by size",
        "Made by `python benchmarks/order_by_size.py` of `../scores.csv.xz`. Held-out nats per byte; means over seeds.",
        table(["bytes|,", "parameters|>", "precision", "seeds|>", "Gecko|.4f", "Megalodon, ungated − Gecko|>",
               "Llama 2 − Gecko|>", "interval"], losses),
        *_laws(),
        "## Minutes",
        "Time of the training steps of one run on one thread, or on the GPU, at their median speed. Runs shared their "
        "machine, so times of different rows must not be compared, nor those of runs that a note names.",
        table(["bytes|,", "parameters|>", *(f"{name}|>" for name in NAMES.values()), "processor or GPU, notes"], times),
        "## Commands",
        "\n".join(f"- `{record['command']}` ({record['commit'][:7]})" for record in records()) + "\n",
    ])  # fmt: skip


def _difference(recipe: Mapping[str, Any] | None) -> str:
    if recipe is None:
        return "not run"
    interval = recipe["difference_interval"]
    return f"{recipe['difference']:+.4f} [{interval['low']:+.4f}, {interval['high']:+.4f}]"


def _laws() -> Iterator[str]:
    for tokens, points in points_by_bytes().items():
        laws = {name: law for name in NAMES if name in points and (law := power_law(points[name]))}
        if laws:
            falls = ", ".join(f"{1 - 2 ** -law[1]:.1%} ({NAMES[name]})" for name, law in laws.items())
            yield f"With {tokens:,} bytes the loss falls per doubling of the parameters by {falls} (`{PICTURE}`)."


def draw() -> None:
    """Draw losses by bytes or time; and by parameters, with a panel for each number of bytes with several sizes."""
    for picture, (name, x, xlabel) in CURVES.items():
        rows = list(rows_of_comparison(kept.comparison(name)))
        save(loss_figure(rows, x, xlabel, HELD_OUT), FOLDER / picture)
    by_bytes = sorted(points_by_bytes().items())
    panels = {tokens: points for tokens, points in by_bytes if any(map(power_law, points.values()))}
    labels = "parameters, millions", "held-out loss, nats per byte"
    figure, rows = new_panels(*labels, len(panels), height=1 + 3 * len(panels))
    for axes, (tokens, points) in zip(rows, panels.items(), strict=True):
        axes.set_title(f"{tokens / 1e6:.0f} M bytes", loc="left", fontsize=12)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for style, name in zip(map(LineStyle.of, range(len(NAMES))), NAMES, strict=True):
            sizes, losses = [size / 1e6 for size, _ in points[name]], [loss for _, loss in points[name]]
            axes.plot(sizes, losses, style.marker, color=style.color)
    for axes, points in zip(rows, panels.values(), strict=True):
        _draw_lines(axes, points)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(lambda size, _: f"{size:g}" if size in (2, 4, 8) else "")
        axes.yaxis.set_minor_formatter("{x:g}")
    save(figure, FOLDER / PICTURE)


def save(figure: Any, path: Path) -> None:
    """Save a figure in few colors, in a fifth of the bytes of a PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    few = Image.open(drawn).convert("RGB").quantize(16, dither=Image.Dither.NONE).convert("RGB")
    few.save(path, lossless=True, method=6, quality=100)


def _draw_lines(axes: Any, points: Points) -> None:
    ends = []
    for number, name in enumerate(NAMES):
        law, style = power_law(points[name]), LineStyle.of(number)
        if law is not None:
            sizes = [min(size for size, _ in points[name]), max(size for size, _ in points[name])]
            losses = [law[0] * size ** -law[1] for size in sizes]
            axes.plot([size / 1e6 for size in sizes], losses, color=style.color, linestyle=style.dashes)
            ends.append((losses[-1], style, NAMES[name]))
    label_line_ends(axes, ends)


def main() -> None:
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
    draw()
    print(page())


if __name__ == "__main__":
    main()
