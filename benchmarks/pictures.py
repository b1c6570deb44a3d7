"""Draw the pictures of docs/how_it_works.md and docs/evidence.md as SVG files that suit light and dark pages.

    python benchmarks/pictures.py --write  # docs/pictures/*.svg
    python benchmarks/pictures.py          # error if a picture is not what this script draws

The sizes of states come from the presets, and the speeds from ``results/training_intel_xeon.md``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

import capacity
import ladder
import torch
from measuring import parser_of

import gecko
from gecko.state import GeckoState

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"

STYLE = """\
svg { --ground: #ffffff; --ink: #1f2933; --quiet: #6b7785; --line: #c3ccd6; --norm: #eef1f5; --cema: #dcebfb;
  --attention: #ddf3e4; --memory: #fdebd2; --output: #efe6fb; --gecko: #1b7f4d; --llama: #b4552d;
  --later: #2f6fb4; --delta: #7a4bb3 }
@media (prefers-color-scheme: dark) { svg { --ground: #161b22; --ink: #e6edf3; --quiet: #9aa7b4; --line: #3d4856;
  --norm: #232b36; --cema: #17324d; --attention: #153a27; --memory: #46310f; --output: #33254d; --gecko: #4cc38a;
  --llama: #f0936a; --later: #79b0ee; --delta: #b79be8 } }
text { fill: var(--ink); font: 14px system-ui, sans-serif; text-anchor: middle }
.small { font-size: 12px; fill: var(--quiet) } .title { font-weight: 600 } .left { text-anchor: start }
.right { text-anchor: end } .flow { fill: none; stroke: var(--quiet); stroke-width: 1.5; marker-end: url(#tip) }
.grid { stroke: var(--line); stroke-width: 1 } .curve { fill: none; stroke-width: 2.5 }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:var(--quiet)"/></marker></defs>'
)


class Drawing:
    """An SVG picture of a width and a height, in pixels."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
            f"<title>{escape(description)}</title>\n<style>\n{STYLE}</style>\n{TIP}\n"
            f'<rect width="{width}" height="{height}" rx="10" style="fill:var(--ground)"/>\n'
        )
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, *lines: str) -> None:
        """Draw a box with lines of text; those after the first are small."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'style="fill:var(--{colour});stroke:var(--line)"/>'
        )
        first = y + height / 2 + 5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 17 * number, line, "small" if number else "title")

    def flow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow along the points."""
        self._parts.append(f'<polyline class="flow" points="{self._join(points)}"/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        self._parts.append(f'<polyline class="curve" style="stroke:var(--{colour})" points="{self._join(points)}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(f'<line class="grid" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" style="fill:var(--{colour})"/>')

    def svg(self) -> str:
        return self._head + "\n".join(self._parts) + "\n</svg>\n"

    @staticmethod
    def _join(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def layer() -> Drawing:
    """One layer: what the mixer computes from the residual stream, and the feed-forward after it."""
    picture = Drawing(760, 560, "A layer of a Gecko: timestep norm, CEMA, attention and memory, gate, feed-forward")
    picture.text(380, 28, "residual stream x, from the layer before", "small")
    picture.flow((380, 36), (380, 58))
    picture.box(240, 60, 280, 44, "norm", "timestep norm", "mean and variance of the document so far")
    picture.flow((330, 104), (330, 140))
    picture.box(205, 142, 250, 44, "cema", "CEMA", "a few damped oscillations per channel")
    picture.flow((330, 186), (330, 212))
    picture.box(270, 214, 120, 28, "norm", "RMS norm")
    picture.flow((520, 82), (600, 82), (600, 262))
    picture.box(545, 264, 110, 40, "norm", "values", "with SiLU")
    picture.flow((330, 242), (330, 262))
    picture.box(225, 264, 210, 40, "norm", "queries and keys", "one vector, scaled four ways")
    picture.flow((270, 228), (105, 228), (105, 418))
    for place, words in enumerate(("also makes the", "gate and the", "hidden branch")):
        picture.text(112, 250 + 16 * place, words, "small left")
    picture.flow((290, 304), (290, 338))
    picture.flow((400, 304), (470, 338))
    picture.flow((560, 304), (390, 338))
    picture.flow((610, 304), (600, 338))
    picture.box(180, 340, 230, 44, "attention", "chunk attention", "this chunk and the one before")
    picture.box(440, 340, 240, 44, "memory", "working memory", "all chunks before those")
    picture.flow((290, 384), (290, 418))
    picture.flow((560, 384), (560, 442), (442, 442))
    joined = "gate × attention + memory + hidden branch", "the first two by a product to the width of x"
    picture.box(60, 420, 380, 44, "output", *joined)
    picture.flow((235, 464), (235, 492))
    picture.flow((380, 47), (30, 47), (30, 512), (138, 512))
    picture.text(38, 66, "x", "small left")
    picture.box(140, 494, 190, 36, "norm", "+ x")
    picture.flow((330, 512), (388, 512))
    picture.box(390, 490, 310, 44, "norm", "+ feed-forward of an RMS norm", "SwiGLU, as in a Llama")
    picture.text(545, 552, "to the next layer", "small")
    return picture


def window() -> Drawing:
    """Which tokens attention sees, and which the memory holds, for one query."""
    description = "A token attends to its own chunk and the previous one; the memory holds all earlier chunks"
    picture = Drawing(760, 250, description)
    names = ["chunk 1", "chunk 2", "chunk 3", "…", "chunk 98", "chunk 99", "chunk 100"]
    for place, name in enumerate(names):
        colour = "attention" if place >= 5 else "memory"
        width = 92 if place == 6 else 96
        picture.box(24 + 100 * place, 60, width, 44, colour, name)
    picture.text(24, 40, "a text, from its beginning", "small left")
    picture.text(716, 40, "the token that is computed now ↓", "small right")
    picture.flow((324, 104), (324, 150))
    added = "one matrix per head; a delta rule adds every chunk to it"
    picture.box(130, 152, 390, 56, "memory", "working memory", added)
    picture.flow((604, 104), (604, 150))
    picture.box(545, 152, 190, 56, "attention", "keys and values", "of two chunks, exactly")
    text = "When chunk 101 begins, chunk 99 enters the memory, and chunk 101 takes the place of its keys and values."
    picture.text(380, 236, text, "small")
    return picture


LLAMA_NUMBERS = 2 * 32 * 4096
"""Numbers that the cache of Llama 2 7B keeps for every token: keys and values of 32 layers of width 4,096."""


def state_size() -> Drawing:
    """Numbers kept of a text: the state of gecko-7b, and the cache of a Llama 2 7B, by the length of the text."""
    lengths = [2.0**power for power in range(7, 23)]
    state = GeckoState.empty(gecko.GeckoConfig.preset("gecko-7b"), 1, device=torch.device("meta"))
    kept = sum(x.numel() for x in state.tensors().values())
    series = {
        ("gecko", f"gecko-7b: {kept / 1e6:,.0f} million, always"): [(length, float(kept)) for length in lengths],
        ("llama", "Llama 2 7B: 0.26 million per token"): [(length, LLAMA_NUMBERS * length) for length in lengths],
    }
    return chart(
        series, "Numbers kept of a text, by its length in tokens",
        "What a model keeps of a text: a cache grows with every token, a state does not",
    )  # fmt: skip


def speed() -> Drawing:
    """Training speed by the length of rows, as measured."""
    text = (ROOT / "benchmarks/results/training_intel_xeon.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| [\d.]+ \|$", text, re.MULTILINE)
    table = [[float(cell.replace(",", "")) for cell in row] for row in rows]
    series = {
        ("gecko", "Gecko"): [(length, 1e3 / speed) for length, speed, _ in table],
        ("llama", "Llama with SDPA"): [(length, 1e3 / speed) for length, _, speed in table],
    }
    return chart(
        series, "Training, ms per token by the length of a row; 1 M parameters, two CPU cores",
        "Time per token: that of a Gecko stays, that of a Llama grows with the row",
    )  # fmt: skip


def ladder_changes() -> Drawing:
    """What each rung of the ladder changes: a dot with its interval, beside the margin that was stated before."""
    pairs = [(model.name, ladder.contrast(model.name, model.base)) for model in ladder.RUNGS[1:]]
    found = [(name, None if pair is None else pair.change) for name, pair in pairs]
    ends = [abs(end) for _, change in found if change is not None for end in change[1:]]
    reach = max([0.01, *ends])
    picture = Drawing(760, 92 + 32 * len(found), "Change of the loss by each rung from Megalodon to Gecko")
    title = "Change of the loss by each rung, nats per byte; 95 % intervals over seeds and novels"
    picture.text(24, 32, title, "title left")

    def place(change: float) -> float:
        return 490 + 220 * change / reach

    left, right, bottom = place(-ladder.MARGIN), place(ladder.MARGIN), 58 + 32 * len(found)
    picture.box(left, 50, right - left, bottom - 50, "norm")
    picture.line(place(0), 50, place(0), bottom)
    for change in (-reach, -ladder.MARGIN, ladder.MARGIN, reach):
        picture.text(place(change), bottom + 20, f"{change:+.3f}", "small")
    for number, (name, change) in enumerate(found):
        y = 70 + 32 * number
        picture.text(24, y + 4, name if change else f"{name}: not run", "left")
        if change is not None:
            picture.curve([(place(change[1]), y), (place(change[2]), y)], "gecko")
            picture.dot(place(change[0]), y, "gecko")
    return picture


def memory_capacity() -> Drawing:
    """Recall of pairs beyond the window by bytes of the memory's matrix, for each form: means over numbers of pairs."""
    picture = Drawing(760, 340, "Recall of pairs beyond the attention window, by bytes of state")
    title = "Recall beyond the window, mean of 4 to 64 pairs, by bytes of the memory's matrix"
    picture.text(24, 32, title, "title left")
    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line(70, 290 - 230 * share, 450, 290 - 230 * share)
        picture.text(62, 294 - 230 * share, f"{share:g}", "small right")
    places = {width: 70 + 380 * number / (len(capacity.WIDTHS) - 1) for number, width in enumerate(capacity.WIDTHS)}
    for width, x in places.items():
        picture.text(x, 312, number(4.0 * width * capacity.SHAPE["value_dim"]), "small")
    ends = []
    for name in capacity.whole():
        form = capacity.FORMS[name]
        cells = {cell: fmean(seeds.values()) for cell, seeds in capacity.found(name).items()}
        means = {width: [recall for (_, of), recall in cells.items() if of == width] for width in places}
        points = [(places[width], 290 - 230 * fmean(values)) for width, values in means.items() if values]
        if len(points) > 1:
            picture.curve(points, form.group)
            ends.append((points[-1][1], points[-1][0], name, form.group))
    ends.sort()
    ys = [end[0] for end in ends]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + 18)
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], 322 - 18 * (len(ys) - 1 - i))
    for y, (end, x, name, colour) in zip(ys, ends, strict=True):
        picture.curve([(x + 3, end), (474, y)], colour)
        picture.text(480, y + 4, name, "left")
    return picture


def chart(series: dict[tuple[str, str], list[tuple[float, float]]], title: str, description: str) -> Drawing:
    """Draw curves by colour and label over logarithmic axes, marked with powers of two below and of ten at the left."""
    picture = Drawing(760, 340, description)
    picture.text(70, 32, title, "title left")
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low_x, high_x = math.log2(min(xs)), math.log2(max(xs))
    low_y, high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low_x) / (high_x - low_x)
        return 80 + 630 * across, 290 - 230 * (math.log10(y) - low_y) / (high_y - low_y)

    for power in range(low_y, high_y + 1):
        _, y = place(2.0**low_x, 10.0**power)
        picture.line(80, y, 710, y)
        picture.text(72, y + 4, number(10.0**power), "small right")
    step = max(1, round((high_x - low_x) / 6))
    for exponent in range(round(low_x), round(high_x) + 1, step):
        x, _ = place(2.0**exponent, 10.0**low_y)
        picture.text(x, 312, number(2.0**exponent), "small")
    for (colour, label), points in series.items():
        curve = [place(*point) for point in points]
        picture.curve(curve, colour)
        middle = curve[(len(curve) - 1) * 2 // 3]
        falls = curve[0][1] - curve[-1][1] > 40
        picture.text(middle[0] - 12 * falls, middle[1] - 10, label, "right" if falls else "")
    return picture


def number(value: float) -> str:
    """Write a number with K, M or G, by 1,024 for powers of two and by 1,000 for powers of ten."""
    base = 1024 if math.log2(value) % 1 == 0 and value > 1 else 1000
    power = max(0, min(4, int(math.log(value * 1.0001, base)))) if value >= 1 else 0
    return f"{value / base**power:g}{['', 'K', 'M', 'G', 'T'][power]}"


def drawn() -> tuple[Callable[[], Drawing], ...]:
    """Return the functions of the pictures, whose names are those of the files; without results there is none."""
    known = (memory_capacity,) if capacity.whole() else ()
    return layer, window, state_size, speed, ladder_changes, *known


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    PICTURES.mkdir(exist_ok=True)
    for draw in drawn():
        path, svg = PICTURES / f"{draw.__name__}.svg", draw().svg()
        if arguments.write:
            path.write_text(svg, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != svg:
            raise SystemExit(f"{path.relative_to(ROOT)} is not what this script draws; run it with --write.")


if __name__ == "__main__":
    main()
