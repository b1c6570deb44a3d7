"""Measure the recall of pairs that left the attention window, by number of pairs, key width and form of the memory.

    python benchmarks/capacity.py --jobs 2       # rates, then the grid, then more seeds at the edge; prints the table
    python benchmarks/capacity.py --only linear  # some forms

The same command continues after an interruption: every ended run adds a line to ``results/evidence/capacity.csv``,
which ``evidence.py --write`` packs.

**Task.** Associative recall (MQAR) with two chunks of token 0 between pairs and queries: no query sees a pair by
attention, and one layer passes nothing on, so only the memory (or CEMA) can answer. ``no memory`` is the check. The
number of pairs grows to its size in the first half of training, which ends early once the answers are known.

**Forms.** Each is a Gecko of one layer and one head. All store a matrix of key width × 64 float32 numbers. The adaptive
and the linear rule also hold summaries of the last two chunks: their whole state is 3.5 to 7 times the matrix. The
delta rules write every token, with keys of length 1, in the place of the memory in Gekko's block, which has short
convolutions, separate queries and keys, and a norm of the output, as the published forms have; it has no SiLU on
queries and keys. Each form has the learning rate with the least loss in the middle cell, on rows of the tuning split.
The two highest were added when four forms were best at the highest of four; the last is run for forms that need it.

**Margin**, stated before the first run: in a cell two forms differ if the 95 % interval over three seeds of the paired
difference in recall (Student's t) is beyond ±0.05 (``MARGIN``); over the grid if that of its mean over the cells at the
edge is. Seed 0 of every cell chooses the edge, cells in which any form recalls 0.2 to 0.9 of the pairs, and no more;
seeds 1 to 3 of every form in these cells answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from measuring import parser_of, table
from tables import CODE, DEVICE, WHERE, Interval, Table, arguments, best, over_seeds, processor, rows_of
from torch import Tensor, nn

from gecko.config import GeckoConfig
from gecko.eval.synthetic import SyntheticBatch, TaskSize, generator_of, hits_by_distance, mqar
from gecko.inference.prefill import inference
from gecko.layers.gated_attention import GatedAttention
from gecko.models import Gecko
from gecko.ops.chunk_attention import chunk_attention
from gecko.ops.loss import IGNORED
from gecko.runtime.process import keep_freed_memory
from gecko.train.capture import CapturedGradients
from gecko.train.step import BatchPart, compute_gradients

BEGIN, END = "<!-- benchmarks/capacity.py -->\n", "<!-- end capacity -->\n"
"""Marks of the table in docs/evidence.md, which ``benchmarks/evidence.py --write`` renews."""
MARGIN = 0.05
PAIRS, WIDTHS, RATES, SEEDS = (4, 8, 16, 32, 64), (16, 32, 64, 128), (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), range(1, 4)
MIDDLE, EDGE = (16, 32), (0.2, 0.9)
CHUNK, STEPS, ROWS, TEST_ROWS, KNOWN = 16, 2000, 32, 256, 0.02
"""Tokens of a chunk, steps, rows of a step and of a split, and the mean loss of 25 steps that ends the training."""
SHAPE = {
    "vocab_size": 160, "num_layers": 1, "model_dim": 64, "value_dim": 64, "num_heads": 1, "ffn_dim": 128,
    "chunk_size": CHUNK, "timestep_groups": 4, "cema_modes": 4,
}  # fmt: skip


class LearnedTemperature(GatedAttention):
    """Multiplies the memory's queries and keys by exp(τ); τ is learned per head and is 0 at the start."""

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.log_temperature = nn.Parameter(torch.zeros(config.num_heads, 1, 1))

    def queries_and_keys(self, shared: Sequence[Tensor]) -> tuple[Tensor, ...]:
        query, key, *memory = super().queries_and_keys(shared)
        return query, key, *(x * self.log_temperature.exp() for x in memory)


class DeltaNet(GatedAttention):
    """Has the delta rule of single tokens in the place of the memory; for whole rows, without a state."""

    decays = False

    def __init__(self, config: GeckoConfig) -> None:
        super().__init__(config)
        self.to_strength = nn.Linear(config.model_dim, config.num_heads)
        self.to_decay = nn.Linear(config.model_dim, config.num_heads) if self.decays else None

    def gates_and_residual(self, mx: Tensor, x: Tensor, *first: Any) -> Any:
        shared, gates, terms = super().gates_and_residual(mx, x, *first)
        strength = self.to_strength(mx).sigmoid().mT
        # A new model keeps 0.9975 of the matrix a token.
        decay = torch.zeros_like(strength) if self.to_decay is None else F.logsigmoid(self.to_decay(mx).mT + 6)
        return shared, (gates, strength, decay), terms

    def mix(self, projections: tuple[Tensor, ...], v: Tensor, gates: Any, before: Any, segments: Any) -> Any:
        gates, *rates = gates
        read = delta_rule(*(F.normalize(x, dim=-1) for x in projections[2:]), v, *rates)
        held, _ = before()
        attended, attention = chunk_attention(*projections[:2], v, self.pattern, state=held, segments=segments)
        return self.gated(attended, read, gates, segments), attention, None


class GatedDeltaNet(DeltaNet):
    """Multiplies the matrix by a factor before every token."""

    decays = True


def delta_rule(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, log_decay: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return S_tᵀ q_t with S_t = α_t S_{t−1} + k_t u_tᵀ, u_t = β_t (v_t − α_t S_{t−1}ᵀ k_t), S_0 = 0.

    Within a chunk all u are the solution of one triangular system.

    Args:
        q, k: (B, H, T, key); v: (B, H, T, value); strength: β, log_decay: log α ≤ 0, both (B, H, T).
    """
    length = q.shape[2]
    rest = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    strength, log_decay = (F.pad(x, (0, rest)).unflatten(2, (-1, chunk)) for x in (strength, log_decay))
    total = log_decay.cumsum(-1)
    kept = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    since, left, strength = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None], strength[..., None]
    system = torch.eye(chunk, device=k.device) + (strength * kept * (k @ k.mT)).tril(-1)
    right = torch.cat([strength * v, strength * since * k], dim=-1)
    values, keys = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    inside, state, found = kept * (q @ k.mT), torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        found.append(since[:, :, i] * (q[:, :, i] @ state) + inside[:, :, i] @ new)
        state = since[:, :, i, -1:] * state + (left[:, :, i] * k[:, :, i]).mT @ new
    return torch.cat(found, dim=2)[:, :, :length]


@dataclass(frozen=True)
class Form:
    model: Callable[[int], Mapping[str, Any]] = lambda _: {}
    """Changes of the config by key width."""
    preset: str = "tiny"
    mixer: type[GatedAttention] = GatedAttention
    group: str = "gecko"
    """Colour in the picture."""


PAPER, LINEAR, NONE = "adaptive (paper)", "linear", "no memory"
FORMS = {
    PAPER: Form(),
    "adaptive, learned temperature": Form(mixer=LearnedTemperature),
    "adaptive, keys of 2√width": Form(lambda width: {"memory_key_length": 2 * math.sqrt(width)}),
    "adaptive, norm of the sum, one gate": Form(
        lambda _: {"gate": "sum", "output_norm": True, "gate_activation": "softplus"}, group="later"
    ),
    "adaptive, gated interpolation": Form(lambda _: {"gate": "sum", "memory_gate_channels": 1}, group="later"),
    "Gekko (adaptive, keys as projected)": Form(preset="gekko-tiny", group="later"),
    "Gekko, orthogonal update": Form(lambda _: {"memory": "orthogonal"}, preset="gekko-tiny", group="later"),
    LINEAR: Form(lambda _: {"memory": "linear"}, group="llama"),
    "DeltaNet": Form(preset="gekko-tiny", mixer=DeltaNet, group="delta"),
    "gated DeltaNet": Form(preset="gekko-tiny", mixer=GatedDeltaNet, group="delta"),
    NONE: Form(lambda _: {"memory": "none"}, group="quiet"),
}


@dataclass(frozen=True)
class Cell:
    form: str
    pairs: int
    width: int
    seed: int
    rate: float
    split: str = "test"
    steps: int = STEPS
    lines: ClassVar[int] = 1

    @property
    def key(self) -> tuple[str, ...]:
        parts = self.split, self.form, self.pairs, self.width, self.seed, f"{self.rate:g}", self.steps
        return tuple(map(str, parts))


COLUMNS = ("split", "form", "pairs", "width", "seed", "rate", "steps", "recall", "loss", "steps_run", *WHERE)


def far_pairs(pairs: int, rows: int, *seed: object) -> SyntheticBatch:
    """Return MQAR with two chunks of token 0 between pairs and queries."""
    near = mqar(TaskSize(4 * pairs, SHAPE["vocab_size"], pairs, noise=False), rows, generator_of(*seed))

    def apart(x: Tensor, fill: int) -> Tensor:
        return torch.cat([x[:, : 2 * pairs], x.new_full((rows, 2 * CHUNK), fill), x[:, 2 * pairs :]], dim=1)

    return SyntheticBatch(apart(near.tokens, 0), apart(near.targets, IGNORED), apart(near.sources, -1))


def build(form: Form, width: int) -> Gecko:
    config = GeckoConfig.preset(form.preset, **SHAPE, key_dim=width)
    with mock.patch("gecko.models.gecko.GatedAttention", form.mixer):
        return Gecko(replace(config, **form.model(width)))


def gradients_of(model: Gecko) -> Callable[[SyntheticBatch], Tensor]:
    """Return what replaces the parameters' gradients by those of a batch, and returns its loss; on a GPU by graphs,
    which the orthogonal memory cannot be part of."""
    captured = DEVICE.type == "cuda" and model.config.memory != "orthogonal"
    graphs = CapturedGradients(model, "float32") if captured else None
    weight = torch.ones((), dtype=torch.float64, device=DEVICE)

    def compute(batch: SyntheticBatch) -> Tensor:
        given = batch.tokens.to(DEVICE), batch.targets.to(DEVICE)
        part = BatchPart(*given, torch.zeros_like(batch.tokens), weight)
        if graphs is not None:
            return graphs([part])
        model.zero_grad()
        return compute_gradients(model, [part], "float32")

    return compute


def train(cell: Cell) -> tuple[Gecko, int]:
    """Return a trained model and its number of steps."""
    torch.manual_seed(cell.seed)
    model = build(FORMS[cell.form], cell.width).to(DEVICE)
    gradients = gradients_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.rate, betas=(0.9, 0.95), weight_decay=0.0)
    rise, losses = max(1, cell.steps // 10), list[float]()
    for step in range(cell.steps):
        down = 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, cell.steps - rise)))
        optimizer.param_groups[0]["lr"] = cell.rate * ((step + 1) / rise if step < rise else down)
        grown = 4 if step < cell.steps / 4 else 2 if step < cell.steps / 2 else 1
        loss = gradients(far_pairs(cell.pairs // grown, ROWS, "train", cell.seed, step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses, loss.item()][-25:] if grown == 1 else []
        if len(losses) == 25 and fmean(losses) < KNOWN:
            return model, step + 1
    return model, cell.steps


def run(cell: Cell) -> list[tuple[object, ...]]:
    """Train and score a cell; return its line of the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    model, steps = train(cell)
    batch = far_pairs(cell.pairs, TEST_ROWS, cell.split, cell.seed)
    with inference(model):
        logits, _ = model(batch.tokens.to(DEVICE))
        loss = float(model.loss(batch.tokens.to(DEVICE), batch.targets.to(DEVICE)))
    distances = hits_by_distance(batch, logits.argmax(-1).cpu(), CHUNK)
    assert min(distances) >= 2, "no query may see its pair by attention"
    hits = [hit for found in distances.values() for hit in found]
    return [(*cell.key, f"{fmean(hits):.4f}", f"{loss:.4f}", steps, *CODE, processor())]


def found(form: str) -> dict[tuple[int, int], dict[int, float]]:
    """Return the recall of a form by cell and seed."""
    by_cell: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows_of("capacity.csv"):
        if (row["split"], row["form"], row["steps"]) == ("test", form, str(STEPS)):
            by_cell.setdefault((int(row["pairs"]), int(row["width"])), {})[int(row["seed"])] = float(row["recall"])
    return by_cell


def whole() -> list[str]:
    """Return the forms whose seed 0 ran in all cells: only they have means over cells."""
    return [form for form in FORMS if cells_of(form) <= found(form).keys()]


def edge(lines: Sequence[Mapping[str, str]], steps: int = STEPS) -> set[tuple[int, int]]:
    """Return the cells (pairs, width) that seed 0 of any form chooses."""
    return {
        (int(row["pairs"]), int(row["width"])) for row in lines
        if (row["split"], row["seed"], row["steps"]) == ("test", "0", str(steps))
        and EDGE[0] <= float(row["recall"]) <= EDGE[1]
    }  # fmt: skip


def cells_of(form: str) -> set[tuple[int, int]]:
    return {(pairs, width) for width in (WIDTHS if form != NONE else (64,)) for pairs in PAIRS}


def tuned(form: str, steps: int, lines: Sequence[Mapping[str, str]]) -> tuple[float | None, set[float]]:
    """Return the best rate of a form among those that ran, and those that a choice needs and were not run."""
    losses = {
        float(row["rate"]): float(row["loss"]) for row in lines
        if (row["split"], row["form"], row["steps"]) == ("tuning", form, str(steps))
    }  # fmt: skip
    rate = best(losses)
    return rate, set(RATES if rate in RATES[-2:] else RATES[:-1]) - losses.keys()


def grid(only: Sequence[str], steps: int, seeds: range, lines: Sequence[Mapping[str, str]]) -> Iterator[Cell]:
    """Yield the cells of forms at their best rate: seed 0 everywhere, others where any form is at the edge.

    A form that lacks a rate has none.
    """
    at_edge = edge(lines, steps)
    for form in only:
        rate, missing_rates = tuned(form, steps, lines)
        if rate is not None and not missing_rates:
            for pairs, width in sorted(cells_of(form) if seeds.start == 0 else cells_of(form) & at_edge):
                yield from (Cell(form, pairs, width, seed, rate, "test", steps) for seed in seeds)


def missing(*forms: str) -> int:
    """Return how many runs a comparison of forms lacks: seed 0 of each cell, and all others of those at the edge."""
    at_edge = edge(rows_of("capacity.csv"))
    return sum(
        len({0, *(SEEDS if cell in at_edge else ())} - found(form).get(cell, {}).keys())
        for form in forms for cell in cells_of(form)
    )  # fmt: skip


def paired(form: str, base: str) -> dict[tuple[int, int], list[float]]:
    """Return the recall of a form less that of ``base`` by seed, for each cell that has the seeds of the edge."""
    one, other = found(form), found(base)
    both = {cell: (one[cell], other[cell]) for cell in sorted(one.keys() & other.keys())}
    return {
        cell: [mine[n] - its[n] for n in SEEDS]
        for cell, (mine, its) in both.items() if set(SEEDS) <= mine.keys() & its.keys()
    }  # fmt: skip


def difference(form: str, base: str) -> tuple[Interval, int] | None:
    """Return a form's recall less that of ``base`` over the cells at the edge, with its interval over seeds, and their
    number."""
    if not (cells := paired(form, base)):
        return None
    return over_seeds([fmean(values) for values in zip(*cells.values(), strict=True)]), len(cells)


def differing(form: str, base: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the cells with all seeds in which a form recalls more than ``base`` beyond the margin, and less."""
    intervals = {cell: over_seeds(values) for cell, values in paired(form, base).items()}
    more = [cell for cell, one in intervals.items() if one.low > MARGIN]
    return more, [cell for cell, one in intervals.items() if one.high < -MARGIN]


def tuning_line() -> str:
    """Return a line with the recall of each form in the tuning cell at its best rate, and this rate."""
    lines, shown = rows_of("capacity.csv"), []
    for form in FORMS:
        rate, _ = tuned(form, STEPS, lines)
        cell = ("tuning", form, "" if rate is None else f"{rate:g}")
        recalls = [float(row["recall"]) for row in lines if (row["split"], row["form"], row["rate"]) == cell]
        shown += [f"{form} {recall:.3f} at {cell[-1]}" for recall in recalls]
    cell = "Recall of {} pairs with keys of {} on the rows that chose the learning rate, seed 0: ".format(*MIDDLE)
    return f"{cell}{'; '.join(shown)}.\n" if shown else "Not run yet.\n"


def _beside_the_paper(form: str) -> str:
    """Return the difference of a form to the paper's, over all cells at the edge only: those of few pairs ran first."""
    if form == PAPER:
        return ""
    if runs := missing(form, PAPER):
        return f"{runs} runs are missing"
    if (change := difference(form, PAPER)) is None:
        return ""
    more, less = map(len, differing(form, PAPER))
    return f"{change[0].shown(3)}, {change[1]} cells: {more} more, {less} less"


def page() -> str:
    """Return a line of the tuning cell, and a Markdown table of the ``whole`` forms: recall by pairs, means over key
    widths, and the difference to the paper's."""
    rows = []
    for form in whole():
        cells = found(form)
        shown = [fmean(fmean(seeds.values()) for (n, _), seeds in cells.items() if n == pairs) for pairs in PAIRS]
        rows.append((form, *shown, sum(map(len, cells.values())), _beside_the_paper(form)))
    columns = [
        f"recall, mean of key widths {', '.join(map(str, WIDTHS))}", *(f"{n} pairs|.3f" for n in PAIRS), "runs|d",
        "less the paper's, 95 % over seeds; cells beyond the margin",
    ]  # fmt: skip
    picture = "![Recall by bytes of state](pictures/memory_capacity.svg)"
    return f"{tuning_line()}{picture}\n\n{table(columns, rows)}\n" if rows else tuning_line()


def main() -> None:
    parser = parser_of(__doc__, write=False, steps=(STEPS, "fewer for a trial; with --results elsewhere"))
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM")
    given = arguments(parser)

    def tuning() -> Iterator[Cell]:
        for form in given.only:
            _, rates = tuned(form, given.steps, rows_of("capacity.csv"))
            yield from (Cell(form, *MIDDLE, 0, rate, "tuning", given.steps) for rate in sorted(rates))

    parts: tuple[Callable[[], Iterator[Cell]], ...] = (
        tuning,
        tuning,
        lambda: grid(given.only, given.steps, range(1), rows_of("capacity.csv")),
        lambda: grid(given.only, given.steps, SEEDS, rows_of("capacity.csv")),
    )
    Table("capacity.csv", COLUMNS).work_through(parts, run, given.jobs)
    print(page())


if __name__ == "__main__":
    main()
