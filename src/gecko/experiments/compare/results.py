"""Results of a comparison: the values of ``comparison.json``, and all tables, pictures and pages made from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from gecko.eval.results import Interval, methods, over_rows, over_seeds, standard_error
from gecko.experiments.compare.plan import Planned, evaluation_of, rate_name
from gecko.experiments.figures import AXES, loss_pictures
from gecko.experiments.inputs import COMPARISON, COMPARISON_FORMAT
from gecko.experiments.rows import HELD_OUT, Model, Row, data_words, grouped
from gecko.io.files import parse_json, whole_file, write_text
from gecko.pages import LineStyle, Listing, Section, Table, is_page, pairs, settings_tables
from gecko.pages import write_page as write_html
from gecko.runtime.process import code_name, code_version
from gecko.train.evaluate import Evaluation
from gecko.train.metrics import METRICS, read_metrics, seconds_by_step
from gecko.train.settings import flatten

PAGE = "comparison.html"
PICTURES = ("loss-by-tokens", "loss-by-time")
Values = dict[str, Any]
"""An object of ``comparison.json``."""


class RunResult(NamedTuple):
    """Entry of a finished run in ``comparison.json``, and its evaluation, with the losses by row for intervals."""

    values: Values
    evaluation: Evaluation

    @classmethod
    def of(cls, planned: Planned, parameters: int) -> RunResult | None:
        """Return the result of a planned run; None if it is not finished."""
        run, evaluation = planned.run, evaluation_of(planned.run)
        if evaluation is None:
            return None
        records = read_metrics(run.folder / METRICS)
        steps = [record for record in records if record["kind"] == "train"]
        if len(steps) != run.steps:
            raise ValueError(
                f"{run.folder}/metrics.jsonl must have one line for each of {run.steps} steps; it has {len(steps)}. "
                "Restore it, or delete the run's folder: the same command trains it again."
            )
        seconds = seconds_by_step(steps, run.tokens_before)
        curve = [
            {"step": record["step"], "tokens": run.tokens_before(record["step"]), "seconds": seconds[record["step"]],
             "nats_per_byte": record["nats_per_byte"]}
            for record in records if record["kind"] == "validation"
        ]  # fmt: skip
        return cls({
            "recipe": planned.recipe, "seed": run.seed, "folder": f"{planned.recipe}/{planned.name}",
            "parameters": parameters, "learning_rate": run.optimizer.learning_rate, "steps": len(steps),
            "tokens": run.tokens_before(len(steps)), "skipped_steps": sum("skipped" in record for record in steps),
            "seconds": seconds[len(steps)],
            "tokens_per_second": statistics.median(record["tokens_per_second"] for record in steps), "curve": curve,
            "nats_per_byte": evaluation.nats_per_byte, "nats_per_token": evaluation.loss,
            "held_out_tokens": evaluation.tokens,
        }, evaluation)  # fmt: skip


def summarise(results: Sequence[RunResult], first: str) -> list[Values]:
    """Return one summary per recipe with results. The others are compared with the recipe ``first``.

    Losses are held-out nats per byte. Differences are means over the seeds that both recipes have.
    """
    by_recipe, summaries = grouped(results, lambda result: str(result.values["recipe"])), list[Values]()
    for recipe, of in by_recipe.items():
        others = by_recipe.get(first, []) if recipe != first else []
        pairs = [(mine, other) for mine in of for other in others if mine.values["seed"] == other.values["seed"]]
        losses = [result.evaluation.nats_per_byte for result in of]
        differences = [mine.evaluation.nats_per_byte - other.evaluation.nats_per_byte for mine, other in pairs]
        interval = over_seeds(losses) if len(of) > 1 else _over_rows(of[0].evaluation)
        between = over_seeds(differences) if len(pairs) != 1 else _over_rows(*(one.evaluation for one in pairs[0]))
        summaries.append({
            **{name: of[0].values[name] for name in ("recipe", "parameters", "learning_rate")},
            "seeds": [result.values["seed"] for result in of], "nats_per_byte": statistics.fmean(losses),
            "standard_error": standard_error(losses), "interval": interval and asdict(interval),
            "difference": statistics.fmean(differences) if differences else None,
            "difference_seeds": [mine.values["seed"] for mine, _ in pairs],
            "difference_interval": between and asdict(between),
            **{name: statistics.fmean(result.values[name] for result in of)
               for name in ("seconds", "tokens_per_second")},
        })  # fmt: skip
    return summaries


def _over_rows(evaluation: Evaluation, other: Evaluation | None = None) -> Interval | None:
    """Return the interval of the loss in nats per byte, or of its difference to ``other``, paired by row.

    None if losses by row are not recorded.
    """
    if not evaluation.row_losses or (other is not None and not other.row_losses):
        return None
    losses = np.array(evaluation.row_losses)
    if other is not None:
        if other.row_targets != evaluation.row_targets:
            raise ValueError("models are compared on the same held-out rows; these two were tested on different ones.")
        losses = losses - np.array(other.row_losses)
    return over_rows(losses, evaluation.row_targets, evaluation.nats_per_byte / evaluation.loss)


def save(folder: Path, comparison: Values) -> None:
    """Write ``comparison.json`` atomically."""
    write_text(folder / COMPARISON, json.dumps(comparison, indent=1) + "\n")


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder is a run's, or holds files of a comparison's names that are of something else."""
    if (folder / "checkpoints").exists() or (folder / METRICS).exists():
        raise ValueError(f"--out must be a folder for a comparison; {folder} is that of a run. Choose another one.")
    page = folder / PAGE
    ours = page.is_file() and is_page(page)
    for path in (page, *(folder / f"{picture}.png" for picture in PICTURES)):
        if path.exists() and not ours:
            raise ValueError(
                f"{path} must have been written by gecko compare, which replaces it; it was not. Move it away, or "
                "choose another --out."
            )
    path = folder / COMPARISON
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get("format")
    except FileNotFoundError:
        return
    except (ValueError, AttributeError):
        found = None
    if found != COMPARISON_FORMAT:
        raise ValueError(
            f"{path} must have been written by gecko compare ({COMPARISON_FORMAT}); it was not, or it is damaged. Move "
            "it away: it is made again from the runs beside it."
        )


def comparison_tables(comparison: Mapping[str, Any], name: str = "") -> list[Table]:
    """Return the tables of losses, costs and tuning, as far as they are known.

    Args:
        name: name of the comparison, for the titles of a page that shows several.
    """
    of = f"{name}: " if name else ""
    recipes, tuning, runs = comparison["recipes"], comparison["tuning"], comparison["runs"]
    losses = [
        [one["recipe"], f"{one['nats_per_byte']:.4f}", _ends(one["interval"], ".4f"),
         *(("", "") if one["difference"] is None else
           (f"{one['difference']:+.4f}", _ends(one["difference_interval"], "+.4f")))]
        for one in recipes
    ]  # fmt: skip
    costs = [
        [one["recipe"], f"{one['parameters']:,}", rate_name(one["learning_rate"]), ", ".join(map(str, one["seeds"])),
         f"{one['tokens_per_second']:,.0f}", duration(one["seconds"])] for one in recipes
    ]  # fmt: skip
    tokens = " or ".join(sorted({f"{run['held_out_tokens']:,}" for run in runs}))
    intervals = [one[name] for one in recipes for name in ("interval", "difference_interval") if one[name] is not None]
    note = (
        f"Over {tokens} held-out tokens per run. Differences: to {comparison['first']}, paired by seed. Intervals: "
        f"{methods(Interval(**one) for one in intervals) or 'none'}."
    )
    tables = [] if not recipes else [
        Table(f"{of}Held-out loss, nats per byte", ["recipe", "mean", "95 % interval", "difference", "95 % interval"],
              losses, [*_verdicts(recipes, comparison["first"]), note]),
        Table(f"{of}Training", ["recipe", "parameters", "learning rate", "seeds", "tokens/s", "training time"],
              costs, ["Training time and tokens/s: mean over seeds, of training steps alone."]),
    ]  # fmt: skip
    return tables if tuning is None else [*tables, _tuning_table(comparison, of)]


def _verdicts(recipes: Sequence[Values], first: str) -> Iterator[str]:
    """Yield for each recipe but ``first`` a text that says whether its loss differs from the loss of ``first``."""
    for recipe in recipes:
        name, interval = recipe["recipe"], recipe["difference_interval"]
        if name == first:
            continue
        if interval is None:
            yield f"{name} and {first} have no common seed with an interval, so nothing is said of their difference."
            continue
        low, high = sorted((abs(interval["low"]), abs(interval["high"])))
        found = f"{name} is {'worse' if interval['low'] > 0 else 'better'} than {first}, by {low:.4f} to {high:.4f}."
        if interval["low"] <= 0 <= interval["high"]:
            found = f"No difference between {name} and {first} is shown; more seeds or longer runs may show one."
        yield found if len(recipe["difference_seeds"]) > 1 else f"{found} It is one seed; others may differ more."


def _ends(interval: Values | None, form: str) -> str:
    return "none" if interval is None else f"{interval['low']:{form}} .. {interval['high']:{form}}"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _tuning_table(comparison: Mapping[str, Any], of: str) -> Table:
    """Return the table of held-out losses by recipe and learning rate."""
    tuning = comparison["tuning"]
    found = {(trial["recipe"], trial["learning_rate"]): trial for trial in tuning["trials"]}
    rates, tokens = tuning["learning_rates"], max((trial.get("tokens", 0) for trial in tuning["trials"]), default=0)

    def cell(recipe: str, rate: float) -> str:
        trial = found.get((recipe, rate))
        if trial is None:
            return ""
        loss = trial["state"] if trial["nats_per_byte"] is None else f"{trial['nats_per_byte']:.4f}"
        return f"{loss} *" if rate == tuning["chosen"].get(recipe) else loss

    note = (
        f"*: chosen, the lowest. One run each, seed {comparison['seeds'][0]}, over {tokens or 'an unknown number of'} "
        "held-out tokens; no intervals."
    )
    title = f"{of}Tuning: held-out nats per byte after {tuning['steps']:,} steps"
    lines = [[recipe, *(cell(recipe, rate) for rate in rates)] for recipe in comparison["parameters"]]
    return Table(title, ["recipe", *map(rate_name, rates)], lines, [note])


def plain_table(title: str) -> RichTable:
    """Return an empty table for the terminal."""
    return RichTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False, show_edge=False,
        collapse_padding=True,
    )  # fmt: skip


def print_tables(comparison: Mapping[str, Any], console: Console) -> None:
    """Print the tables, the unfinished runs and the notes."""
    for table in comparison_tables(comparison):
        shown = plain_table(table.title)
        shown.add_column(str(table.columns[0]), overflow="fold")
        for name in table.columns[1:]:
            shown.add_column(str(name), justify="right", no_wrap=True)
        for line in table.rows:
            shown.add_row(*map(str, line))
        console.print(shown)
        console.print(*table.notes, "", sep="\n")
    for label, state in comparison["unfinished"].items():
        console.print(f"not finished: {label} ({state})")
    for note in comparison["notes"]:
        console.print(f"note: {note}")


def rows_of_comparison(comparison: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the held-out losses of all runs by step."""
    data = {name.removeprefix("data."): value for name, value in comparison["settings"].items()}
    models = {name: Model(name, LineStyle.of(number)) for number, name in enumerate(comparison["parameters"])}
    for run in comparison["runs"]:
        for point in run["curve"]:
            if point["nats_per_byte"] is not None:
                case = {"step": point["step"], "tokens": point["tokens"], "minutes": point["seconds"] / 60}
                yield Row(models[run["recipe"]], run["seed"], "training", (data_words(data),), case, HELD_OUT,
                          point["nats_per_byte"], None, 1, "rows", run)  # fmt: skip


def write_page(folder: Path, comparison: Mapping[str, Any]) -> Path:
    """Write the page, and its pictures as PNG files beside it; ImportError without matplotlib or Jinja."""
    remarks = [f"{label}: {state}" for label, state in comparison["unfinished"].items()] + comparison["notes"]
    rows = list(rows_of_comparison(comparison))
    pictures = loss_pictures(rows, lambda recipe, why: remarks.append(f"{recipe}: {why}"), AXES[: len(PICTURES)])
    for name, picture in zip(PICTURES, pictures, strict=False):
        with whole_file(folder / f"{name}.png") as temporary:
            picture.figure.savefig(temporary, format="png", dpi=200)
    intro = (
        "Thin lines are seeds, thick lines their means; all points are over the same held-out rows. The final losses "
        "in the tables are over more rows."
    )
    runs, recipes = comparison["runs"], comparison["recipes"]
    columns = ["run", "nats per byte", "held-out tokens", "tokens trained on", "skipped steps", "tokens/s",
               "training time"]  # fmt: skip
    lines = [
        [f"{run['recipe']} seed {run['seed']}", f"{run['nats_per_byte']:.4f}", f"{run['held_out_tokens']:,}",
         f"{run['tokens']:,}", f"{run['skipped_steps']}", f"{run['tokens_per_second']:,.0f}", duration(run["seconds"])]
        for run in runs
    ]  # fmt: skip
    models = [pairs(name, flatten(model), folded=True) for name, model in comparison["models"].items()]
    machine = {**comparison["hardware"], "Package": code_name(code_version())}
    sections = [
        Section("Held-out loss", intro, pictures, [*comparison_tables(comparison), Table("Runs", columns, lines)]),
        *([Section("Not finished, and notes", tables=[Table("", (), [[one] for one in remarks], heads=0)])]
          if remarks else []),
        Section("Settings that all runs share", tables=settings_tables(comparison["settings"])),
        Section("Models", tables=models),
        Section("Machine and code", tables=[pairs("", machine)]),
        Section("Command", texts=[Listing(comparison["command"])]),
    ]  # fmt: skip
    verdicts = " ".join(_verdicts(recipes, comparison["first"]))
    summary = (
        f"{verdicts} {len(runs)} runs of {runs[0]['tokens']:,} tokens each, of {len(recipes)} recipes; the same texts "
        f"in the same order for every model of a seed, and the same optimizer. All numbers are in {COMPARISON}."
    )
    write_html(folder / PAGE, f"Comparison: {', '.join(comparison['parameters'])}", summary, sections)
    return folder / PAGE
