"""The first table of docs/evidence.md: each claim with its numbers from benchmarks/results/evidence, and a verdict.

    python benchmarks/evidence.py            # print the table
    python benchmarks/evidence.py --write    # put it into docs/evidence.md, and write the pages with all numbers

Verdicts are computed from the same numbers; each function has its condition. "Holds" is said only where a margin, or
the level of a test, was stated before the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import capacity
import diagnostics
import kept
import ladder
import long_context
import memory_forms
import numpy as np
import order_by_size
import retrieval
from measuring import parser_of
from measuring import table as markdown
from tables import Interval, best, over_seeds, pack

from gecko.eval.results import wilson

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
BEGIN, END = "<!-- benchmarks/evidence.py -->\n", "<!-- end -->\n"
RECALL = (
    "diagnose/mqar-memory-{memory}-growth-0.77-items-16-length-256-vocab_size-64-vocab_size-64-key_dim-64"
    "-learning_rate-5e-3-steps-1300-{seed}"
)

CAVEAT = (
    "Where one seed was run (parts, longer keys, contexts of 64 K, and some comparisons of the ungated Megalodon and "
    "the Llama), brackets are over rows of text and **too narrow** for a claim about seeds or documents. Rates of all "
    "comparisons with the ungated Megalodon were chosen after 2 MB, on the novels that score. Keys of x: the initial "
    "length of the memory's keys, 1 in the paper.\n\n"
)

Row = tuple[str, str, str]
"""Claim, evidence and verdict."""


def _difference(file: str, name: str) -> Interval:
    """Return the difference of a recipe to the first one."""
    recipe = next(one for one in kept.comparison(f"comparison/{file}")["recipes"] if one["recipe"] == name)
    return _interval(recipe["difference"], recipe["difference_interval"])


def _interval(value: float, ends: Mapping[str, float]) -> Interval:
    return Interval(value, ends["low"], ends["high"])


def order() -> Row:
    """Gecko must be better in every comparison, by all of the interval."""
    shown, lows = [], []
    for model, name in order_by_size.OTHERS.items():
        comparisons = map(order_by_size.recipes_of, order_by_size.records())
        found = [recipes[model] for recipes in comparisons if model in recipes]
        lows.append(min(one["difference_interval"]["low"] for one in found))
        differences = [one["difference"] for one in found]
        shown.append(
            f"{name} {min(differences):+.3f} to {max(differences):+.3f} in {len(found)} comparisons, the lowest "
            f"end of an interval {lows[-1]:+.3f}"
        )
    sizes = [
        (min(record["parameters"].values()), order_by_size.tokens_of(record)) for record in order_by_size.records()
    ]
    budgets = dict.fromkeys(f"{size / 1e6:.0f} M parameters, {read / 1e6:.0f} MB" for size, read in sizes)
    text = f"nats per byte above Gecko: {'; '.join(shown)} ({'; '.join(budgets)})"
    claim = "With equal bytes Gecko is better than the ungated Megalodon and Llama 2"
    return claim, text, _without_margin(min(lows) > 0)


def ahead(baseline: str, size: str) -> Row:
    """Holds if the whole interval over all seeds is beyond the margin that the ladder states."""
    claim = f"With equal bytes Gecko is better than {baseline}: {size} parameters"
    names, gecko = ladder.BASELINES[baseline, size]
    ran, chosen = sum(bool(ladder.losses_of(name)) for name in names), ladder.tuned(names)
    found = None if chosen is None else ladder.contrast(chosen, gecko)
    if chosen is None or found is None:
        return claim, "no seed that all settings and Gecko have" if ran else "not run", "open"
    model, end = ladder.MODELS[chosen], ladder.end_of_rates(chosen, names)
    seeds, losses = ladder.tuning_losses(ladder.contenders(names))
    numbers = ", ".join(map(str, sorted(seeds)))
    text = (
        f"{found.change.shown()}: nats per byte above Gecko, four novels, 10 MB, {found.seeds} of {model.seeds} seeds"
        f"{', which hardly decide' if found.seeds == 2 else ''}; at “{chosen}”, the best of {ran} of {len(names)} "
        f"settings run: the tuning novels kept {len(losses)}, which no other leads by more than {ladder.MARGIN} in the "
        f"runs that both have, and chose it by seeds {numbers}; its rate, {model.rate:g}, is "
        f"{f'the {end} end of' if end else 'inside'} those run{'; pairs of different code' * found.other_code}"
    )
    missing, verdict = ladder.missing(names, gecko), _verdict(found.change.low > ladder.MARGIN)
    if np.isnan(found.change.mean):
        verdict = "open: a run diverged"
    elif missing:
        verdict = f"open: {missing} or more runs are missing"
    elif end:
        verdict = f"open: the chosen rate is the {end} end"
    if baseline == ladder.MEGALODON:
        verdict += f"; by the earlier rule: {_by_the_earlier_rule(size)}"
    return claim, text, verdict


def _by_the_earlier_rule(size: str) -> str:
    """Return the verdict by the rule of ``ladder.EARLIER``."""
    names, gecko = ladder.EARLIER[size]
    missing = sum(ladder.MODELS[name].seeds - len(ladder.seeds_of(ladder.losses_of(name))) for name in (*names, gecko))
    chosen = best(ladder.tuning_losses(names)[1])
    found = None if missing or chosen is None else ladder.contrast(chosen, gecko)
    return f"open, {missing} runs are missing" if found is None else _verdict(found.change.low > ladder.MARGIN)


def signs() -> Row:
    """Holds if a two-sided sign test over all sizes and seeds is below 0.05; five pairs cannot reach that."""
    ahead, runs, p = ladder.signs()
    claim = "Gecko is ahead of Megalodon with SwiGLU, over all sizes and seeds"
    least = min(1.0, 2.0 ** (1 - runs))
    text = (
        f"ahead in {ahead} of n = {runs} pairs of runs of one size and seed; sign test, two-sided, p = {p:.2g}; "
        f"the least p of {runs} pairs is {least:.2g}{', so they cannot decide' if least >= 0.05 else ''}"
    )
    small = f"open: {runs} pairs are too few" if least >= 0.05 else "not shown"
    return claim, text, small if p >= 0.05 else _verdict(2 * ahead > runs)


def rules() -> Row:
    """Holds if the whole interval over seeds, in the cells at the edge, is beyond the margin ``capacity.py`` states."""
    claim = "The adaptive memory recalls more pairs beyond the window than the linear one"
    forms = capacity.PAPER, capacity.LINEAR
    missing, found = capacity.missing(*forms), capacity.difference(*forms)
    if found is None and {*forms} <= {*capacity.whole()}:
        means = (fmean(seeds[0] for seeds in capacity.found(form).values()) for form in forms)
        text = "seed 0 alone, mean recall of all {} cells: adaptive {:.3f}, linear {:.3f}"
        return claim, text.format(len(capacity.cells_of(forms[0])), *means), f"open: {missing} runs are missing"
    if found is None:
        return claim, "not run" if missing else "no cell is at the edge", "open"
    more, less = (
        str(len(cells)) + "".join(f" ({pairs} pairs, keys of {width})" for pairs, width in cells)
        for cells in capacity.differing(*forms)
    )
    text = (
        f"{found[0].shown(3)} of the pairs recalled, less the linear rule's, over {found[1]} cells of pairs and "
        f"key width that seed 0 chose, by three other seeds; beyond {capacity.MARGIN} more in {more} of them, less in "
        f"{less}"
    )
    return claim, text, f"open: {missing} runs are missing" if missing else _verdict(found[0].low > capacity.MARGIN)


def parts() -> Row:
    """A part helps if the loss without it is higher by more than Gecko's seeds differ; one may harm by its rows."""
    replaced = {
        "chunk": ("sliding chunks", "attention within chunks"), "window": ("sliding chunks", "sliding window"),
        "cumulative": ("decay norm", "cumulative norm"), "linear": ("adaptive rule", "linear memory"),
        "no_memory": ("memory", "no memory"),
    }  # fmt: skip
    found = {both: _difference("ablations", f"compare_{name}") for name, both in replaced.items()}
    text = "; ".join(f"{other} {change.shown(3)}" for (_, other), change in found.items())
    runs = kept.comparison("comparison/comparison")["runs"]
    losses = [one["nats_per_byte"] for one in runs if one["recipe"] == "compare_gecko"]
    needed = [f"{part}, not {other}" for (part, other), x in found.items() if x.mean > max(losses) - min(losses)]
    lower = [other for (_, other), change in found.items() if change.high < 0]
    where = f"for {' and '.join(needed)}" + f"; lower with {' and '.join(lower)}" * bool(lower)
    verdict = _without_margin(bool(needed), where)
    return "Each new part helps: loss with it replaced (rows of 2,048 bytes of books)", text, verdict


def norms() -> Row:
    """The decay norm is better beyond 2 K if the cumulative one's loss is further behind with a longer context."""
    contexts, forms = {"2 K": 2**11, "16 K": 2**14, "256 K": 2**18}, ("compare_cumulative", "compare_gecko")
    records = [[kept.read(f"perplexity/{form}-norms-{seed}") for seed in range(3)] for form in forms]
    losses = [[[_score(one, "nats a token", context=size)["value"] for size in contexts.values()] for one in seeds]
              for seeds in records]  # fmt: skip
    behind = np.subtract(losses[0], losses[1])
    shown = ", ".join(
        f"{over_seeds(column).shown()} at {name}" for name, column in zip(contexts, behind.T, strict=True)
    )
    growth = over_seeds(behind[:, -1] - behind[:, 0])
    text = (
        f"nats per byte of the first 524,288 bytes of Gibbon above Gecko's, 5 MB, 3 seeds: {shown}; from 2 K to 256 K "
        f"{growth.shown()}, the margin is {ladder.MARGIN}"
    )
    return "The decay norm is better than the cumulative one beyond 2 K", text, _verdict(growth.low > ladder.MARGIN)


def borders() -> Row:
    """No margin was stated beforehand, so the verdict is a size: the excess over a Llama, paired by seed."""
    found = {}
    for name in ("megalodon", "gecko", "llama"):
        records = [kept.read(f"comparison/positions-compare_{name}-{seed}") for seed in range(3)]
        found[name] = [_score(record, "border minus rest")["value"] for record in records]
    shown = {name: over_seeds(np.subtract(found[name], found["llama"])) for name in ("megalodon", "gecko")}
    text = "; ".join(f"{name.capitalize()} {', '.join(f'{x:+.3f}' for x in values)}" for name, values in found.items())
    text += "; above the Llama's: " + ", ".join(
        f"{name.capitalize()} {change.shown(3)}" for name, change in shown.items()
    )
    part = shown["gecko"].mean / shown["megalodon"].mean
    end = "not zero" if shown["gecko"].low > 0 else "and zero is in its interval"
    claim = "The loss is higher after chunk borders than after as many bytes of a Llama, which has none"
    return claim, f"border minus rest by seed: {text}", f"Gecko's excess is {part:.0%} of Megalodon's, {end}"


def _score(record: Mapping[str, Any], name: str, **where: object) -> dict[str, Any]:
    return next(
        one for one in record["scores"]
        if one["name"] == name and all(one["where"].get(key) == value for key, value in where.items())
    )  # fmt: skip


def long_texts() -> Row:
    record = kept.read("perplexity/compare_gecko")
    losses = {one["where"]["context"]: one["value"] for one in record["scores"] if one["name"] == "nats a token"}
    text = ", ".join(f"{losses[size]:.4f} at {label}" for size, label in
                     ((2**10, "1 K"), (2**16, "64 K"), (2**20, "1 M"), (2**22, "4 M")))  # fmt: skip
    stable = losses[2**22] < losses[2**16]
    return "Stable up to 4 M bytes, trained on 2,048", f"nats per byte: {text}", _without_margin(stable)


def recall() -> Row:
    long, short = _recall("adaptive-memory_key_length-11.31", range(3)), _recall("adaptive", range(3))
    (none,) = _recall("none", range(1))
    text = (
        f"16 pairs in rows of 256: keys of 11.31 {_listed(long)} by seed, of 1 (the paper's) {_listed(short)}, "
        f"no memory {none:.3f}; guessing 0.06"
    )
    return "The memory recalls pairs that left the window", text, _by_keys(min(long) > 0.95, min(short) > 0.95)


def _recall(memory: str, seeds: range) -> list[float]:
    return [diagnostics.beyond_window(kept.read(RECALL.format(memory=memory, seed=seed))) for seed in seeds]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def needles() -> Row:
    records = [kept.read(name) for name in kept.names("retrieval") if name.endswith("chunk-64-250")]
    by_model = {
        name: [one for one in records if one["model"] == name]
        for name in ("gecko-longer-keys", "gecko-long-keys", "gecko", "no-memory")
    }
    long, middle, short, none = ([_needle_hits(one, 4096, 32) for one in found] for found in by_model.values())
    far = [hits for one in by_model["gecko-longer-keys"] if (hits := _needle_hits(one, 16384, 128))[1]]
    text = (
        f"one needle, 32 to 63 chunks of 64 away: keys of 11.31 {_shares(long)}, of 5.66 {_shares(middle)}, "
        f"of 1 {_shares(short)}, no memory {_shares(none)}; 128 to 255 chunks away (64 windows), one seed: keys of "
        f"11.31 {_shares(far)}; guessing 0.10"
    )
    lows = [[wilson(*one).low for one in found] for found in (long, short)]
    return "A needle is found 16 windows away", text, _by_keys(*(min(found) > 0.9 for found in lows))


def _needle_hits(record: Mapping[str, Any], length: int, chunks: int) -> tuple[int, int]:
    """Return the right answers and all answers in documents of this length with one needle, from ``chunks`` away."""
    return kept.pooled(
        one for one in record["scores"]
        if (one["where"]["length"], one["where"]["needles"]) == (length, 1) and one["where"]["chunks"] >= chunks
    )  # fmt: skip


def _shares(found: list[tuple[int, int]]) -> str:
    return ", ".join(f"{hits / total:.3f} (n = {total})" for hits, total in found)


def forms() -> Row:
    """Name the forms that recall more than the first in every seed, and cost less than 0.002 on novels and Gibbon."""
    short = _recall("adaptive", range(3))
    shown, better, count, most = [], [], 0, 0.0
    for name in memory_forms.FORMS:
        found = memory_forms.differences(name)
        books = found["novels"] + found["Gibbon"]
        count += bool(books)
        if min(found["recall"], default=0.0) > max(short) and max(books, default=0.0) < 0.002 and len(books) > 2:
            better.append(name)
            means = {part: over_seeds(found[part]) for part in ("novels", "Gibbon")}
            most = max(most, *(mean.high for mean in means.values()))
            changes = (
                f"{part} {', '.join(f'{one:+.4f}' for one in found[part])}, in all {mean.shown()}"
                for part, mean in means.items()
            )
            shown.append(f"{name}: recall {_listed(found['recall'])}; nats per byte more on {', on '.join(changes)}")
    text = f"{len(better)} of {count} forms, by seed: {' · '.join(shown)}; keys of 1: recall {_listed(short)}"
    claim = "Another form of the memory recalls more, without a cost on novels and Gibbon"
    return claim, text, _without_margin(bool(better), f"for {', '.join(better)}; up to {most:.4f} is not excluded")


def cost_of_keys() -> Row:
    change = _difference("longer-keys-10-mb", "compare_longer_keys")
    long, short = (
        _score(kept.read(f"perplexity/compare_{name}"), "nats a token", context=2**22)["value"]
        for name in ("longer_keys", "gecko")
    )
    text = (
        f"keys of 11.31 against 1, 10 MB, nats per byte: held-out novels {change.shown()}; "
        f"4 M bytes of Gibbon {long - short:+.4f}"
    )
    cheap = {"novels": change.high < 0.002, "Gibbon": long - short < 0.002}
    where = f"on {' and '.join(name for name, is_cheap in cheap.items() if not is_cheap)}"
    return "Longer keys cost something on books", text, _without_margin(not all(cheap.values()), where)


def past() -> Row:
    """Name the forms that use the past by the condition that ``long_context.py`` states."""
    claim = f"A memory uses text further back than {long_context.NEAR:,} bytes: names that a source tree repeats"
    forms = [form for form in long_context.NAMES if form != capacity.NONE]
    leads = {form: long_context.contrast(form, capacity.NONE, long_context.past_gain) for form in forms}
    text = "; ".join(f"{form} {lead.shown(3)}" for form, lead in leads.items() if lead is not None)
    if not text:
        return claim, "not run", "open"
    missing = sum(
        long_context.SEEDS - len(long_context.measured(form, long_context.past_gain)) for form in long_context.NAMES
    )
    using = [form for form in forms if long_context.uses_the_past(form)]
    evidence = (
        f"lead over no memory on repeated names less that on new names, nats per byte, {len(long_context.TEST)} test "
        f"packages, rates chosen after 2 MB, intervals of 95 % for {len(forms)} forms together: {text}"
    )
    return claim, evidence, f"open: {missing} runs are missing" if missing else "; ".join(using) or _verdict(False)


def far_past() -> Iterator[Row]:
    """Yield a row per kind of documents: the gain of 64 K over 2 K beyond the control's, and the loss against it.

    Both must be positive: a model that is worse than the control at 2 K gains even if it does not use the context.
    """
    for name in kept.names("long_context"):
        record, shown, paid, lost = kept.read(name), [], set(), set()
        for gain in (one for one in record["scores"] if one["name"] == "2K less 64K, less the control's"):
            kind, model = gain["where"]["kind"], gain["where"]["model"]
            better = _score(record, "control less model, all", **gain["where"])
            more, less = (_interval(one["value"], one["interval"]) for one in (gain, better))
            shown.append(f"{kind}, {model}: {more.shown(3)} and {less.shown(3)}")
            if more.mean >= 0.01 and less.low > 0:
                paid.add(kind)
            if less.high < 0:
                lost.add(f"{kind}, {model}")
        claim = f"With a memory, a context of 64 K lowers the loss ({Path(name).name})"
        text = f"gain over 2 K minus that without memory, and loss without memory minus loss: {'; '.join(shown)}"
        verdict = _without_margin(bool(paid), f"for {' and '.join(sorted(paid))}")
        yield claim, text, verdict + f"; higher for {'; '.join(sorted(lost))}" * bool(lost)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _without_margin(seen: bool, where: str = "") -> str:
    """Return the verdict on a claim for which no margin was stated before the first run."""
    return f"{f'seen {where}'.strip()}; no margin was stated before" if seen else "not seen"


def _by_keys(long: bool, short: bool) -> str:
    return _without_margin(long or short, "" if short else "with longer keys")


CLAIMS: tuple[Callable[[], Row], ...] = (
    order, parts, norms, borders, long_texts, recall, rules, needles, cost_of_keys, forms, past,
)  # fmt: skip


def table() -> str:
    rows = [*(ahead(*one) for one in ladder.BASELINES), signs(), *(claim() for claim in CLAIMS), *far_past()]
    shown = ((claim, evidence, f"**{verdict}**") for claim, evidence, verdict in rows)
    return CAVEAT + markdown(["claim", "evidence", "verdict"], shown) + "\n"


def marked() -> Iterator[tuple[str, str, str]]:
    """Yield the parts of the page that are made here, each between its marks."""
    yield BEGIN, table(), END
    yield from ((part.BEGIN, part.page(), part.END) for part in (ladder, capacity))
    yield long_context.BEGIN, long_context.table(), long_context.END


def main() -> None:
    given = parser_of(__doc__).parse_args()
    if given.write:
        pack()
    parts = list(marked())
    print(parts[0][1])
    if given.write:
        text = PAGE.read_text(encoding="utf-8")
        for begin, shown, end in parts:
            before, _, rest = text.partition(begin)
            text = before + begin + shown + end + rest.partition(end)[2]
        PAGE.write_text(text, encoding="utf-8")
        order_by_size.draw()
        for page in (diagnostics, retrieval, long_context, order_by_size, memory_forms):
            (page.FOLDER / "README.md").write_text(page.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
