"""The page of ``gecko report``: the paper's figures and tables of runs and evaluations, with its published numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from gecko.eval.results import readable
from gecko.experiments import figures
from gecko.experiments.compare.results import comparison_tables
from gecko.experiments.figures import OF_HUNDRED, PERCENT, Unit, check_packages, length_figure, score_table
from gecko.experiments.inputs import Inputs, gather
from gecko.experiments.rows import MEMORY, Row, by_model, estimate, families, grouped, long_table, token_count
from gecko.pages import Cell, Listing, Picture, Section, Table
from gecko.pages import write_page as write_html
from gecko.runtime.process import code_name, code_version


def write_page(paths: Sequence[Path], out: Path, command: str) -> Inputs:
    """Write the report of runs, comparisons and result files, atomically; return what it shows and leaves out.

    Args:
        out: HTML file to write.
        command: command that makes the page, which is shown on it.

    Raises:
        FileNotFoundError, ValueError: as for ``gather``.
        ImportError: matplotlib, Jinja or SciPy is not installed.
    """
    check_packages()
    inputs = gather(paths)
    sections = build_sections(inputs)
    made = Listing(command, title=f"This page, by Gecko {code_name(code_version())}")
    runs, evaluations = len(inputs.runs), len(inputs.evaluations)
    summary = (
        f"Made from {runs} run{'s' * (runs != 1)} and {evaluations} evaluation{'s' * (evaluations != 1)}. What is "
        "marked “published” is printed in the paper (Ma et al., 2026): other models, data and scale, and not measured "
        "here."
    )
    left_out = Table("Left out", ["what", "why"], inputs.left_out, [] if inputs.left_out else ["Nothing."], heads=0)
    tables = [Table("", ["given", "what it is"], inputs.given, heads=0), left_out]
    ends = [Section("Reproduction", texts=[*reproduction(inputs), made]), Section("Inputs", tables=tables)]
    write_html(out, "Gecko report", summary, [*sections, *ends])
    return inputs


def reproduction(inputs: Inputs) -> list[Listing]:
    """Return commands by code and machine; a run that was resumed with others is listed under both."""
    records = [(record, str(record["command"])) for _, record in inputs.comparisons]
    for run in inputs.runs:
        command = str(run.recipe.get("command", "gecko train ..."))
        records += [(session, command) for session in run.sessions or [{}]]
    records += [(file.record, str(file.record["command"])) for file in inputs.evaluations]
    return [
        Listing("\n".join(dict.fromkeys(command for _, command in group)), hardware, f"Gecko {code}")
        for (code, hardware), group in grouped(records, lambda one: _place(one[0])).items()
    ]


def _place(record: Mapping[str, Any]) -> tuple[str, str]:
    code = code_name(record) if "version" in record else "not recorded"
    hardware = "; ".join(f"{name}: {value}" for name, value in record.get("hardware", {}).items())
    return code, hardware or "not recorded"


def build_sections(inputs: Inputs) -> list[Section]:
    """Return the sections that are not empty. What they leave out is added to ``inputs``."""
    by_kind = grouped(long_table(inputs), lambda row: row.evaluation)
    sections = training_section(by_kind["training"], inputs) if "training" in by_kind else []
    tables: list[Table] = []
    for folder, record in inputs.comparisons:
        first, *others = comparison_tables(record, folder.name)
        unfinished = [f"Not finished: {run} ({state})." for run, state in record["unfinished"].items()]
        tables += [replace(first, notes=[*first.notes, *record["notes"], *unfinished]), *others]
    if tables:
        intro = "Models trained on the same texts in the same order, with the same optimizer."
        sections.append(Section("Comparison", intro, tables=tables))
    for kind, section in _SECTIONS.items():
        if kind in by_kind:
            sections += section(by_kind[kind], by_kind)
    return sections


def _by_text(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows whose values can be compared."""
    return list(grouped(rows, lambda row: row.text).values())


def training_section(rows: Sequence[Row], inputs: Inputs) -> list[Section]:
    """Return the training section, with separate pictures per held-out text, because only their losses compare."""
    groups, models = _by_text(rows), by_model(rows)
    pictures = [picture for group in groups for picture in figures.loss_pictures(group, inputs.leave_out)]
    computed = list[Table]()
    ended = [row for row in rows if row.score == "nats per byte"]
    for row in (row for row in ended if "FLOPs" not in row.case):
        inputs.leave_out(row.model.label, "loss by training FLOPs: not known, as where it starts from weights")
    known = [row for row in ended if "FLOPs" in row.case]
    for group in grouped(known, _held_out_rows).values():
        drawn, table = figures.compute_part(group)
        pictures, computed = [*pictures, *drawn], [*computed, table]
    pictures += length_pictures(rows)
    several = any(len({row.seed for row in mine}) > 1 for mine in models.values())
    intro = "Thick lines: means over seeds at common steps; thin lines: seeds." if several else ""
    if len(groups) > 1:
        intro += " Runs with other texts or tokenizers have their own pictures."
    finals = [line for mine in models.values() for line in _final_lines(mine)]
    note = (
        "Intervals, 95 %: Student's t over seeds; for one seed a bootstrap over held-out rows, which does not include "
        "the variance between seeds. Between tokenizers compare nats per byte."
    )
    columns: list[Cell] = ["model", "seeds", ("nats per byte", "of held-out text"), "nats per token", "n"]
    speeds = "Speeds are those of the machines under Reproduction, with the load they had."
    columns_of_models = ["model", "differs in", "parameters", "steps", "tokens", "learning rate"]
    tables = [
        Table("Held-out loss of the finished models", columns, finals, [note]),
        Table("Models", [*columns_of_models, ("tokens/s", "median of steps, mean over seeds")],
              [_model_line(mine) for mine in models.values()], [speeds]),
        *computed, published_table("training_loss"),
    ]  # fmt: skip
    return [Section("Training", intro.strip(), pictures, tables)]


def _held_out_rows(row: Row) -> tuple[Any, ...]:
    """Return what says on which rows a model was tested. Their tokens may differ by seed."""
    return row.text, row.file.recipe.get("evaluation", {}).get("final_rows")


def _as_fast(rows: Sequence[Row]) -> Callable[[str], bool]:
    """Return whether a setting is equal in models whose speeds are compared by the length of a row: also the rows of a
    batch, if some of one length have several."""
    batches = {(row.case["length"], row.file.recipe["batch_size"]) for row in rows}
    names = {"model", "precision", "compile", "activation_checkpointing", "parallel"}
    names |= {"batch_size"} if len(batches) > len({length for length, _ in batches}) else set()
    return lambda key: key.partition(".")[0] in names


def length_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return pictures of speed and memory of training by the length of a row, of models with several, by machine."""
    pictures, measured = [], [row for row in rows if row.score in ("tokens/s", MEMORY)]
    machines = grouped(measured, lambda row: (_place((row.file.sessions or [{}])[-1])[1], row.score))
    for (machine, score), mine in machines.items():
        found = families(mine, _as_fast(mine))
        lines = {family: of for family, of in found.items() if len({row.case["length"] for row in of}) > 1}
        if lines:
            figure = length_figure(lines, "length", "length of a training row, tokens", score)
            pictures.append(Picture(figure, f"Training: {score} by the length of a row, on {machine}."))
    return pictures


def _final_lines(rows: Sequence[Row]) -> list[list[Cell]]:
    """Return the lines of a model's finished and unfinished runs in the table of final losses."""
    label, scores, lines = rows[0].model.label, grouped(rows, lambda row: row.score), list[list[Cell]]()
    if "nats per byte" in scores:
        losses: list[Cell] = []
        for score in ("nats per byte", "nats per token"):
            mean, interval = estimate(scores[score])
            losses.append((readable(mean), figures.span(interval)))
        found = scores["nats per byte"]
        seeds = ", ".join(str(row.seed) for row in found)
        lines.append([label, seeds, *losses, (figures.counts(found), "for each seed" if len(found) > 1 else "")])
    open_ = [row for row in scores["steps"] if row.file.results is None]
    if open_:
        steps = "; ".join(f"seed {row.seed}: {row.value:,.0f} steps" for row in open_)
        lines.append([label, ("not finished", steps), "", "", ""])
    return lines


def _model_line(rows: Sequence[Row]) -> list[Cell]:
    model, run = rows[0].model, rows[0].file
    steps, rate = run.recipe.get("steps"), run.recipe.get("optimizer", {}).get("learning_rate")
    speeds = [row.value for row in rows if row.score == "tokens/s"]
    return [
        model.label, model.differences or "–",
        f"{run.sessions[0]['parameters']:,}" if run.sessions else "not recorded",
        f"{steps:,}" if steps else "not fixed", f"{run.tokens_before(steps):,}" if steps else "–",
        "–" if rate is None else f"{rate:g}", f"{fmean(speeds):,.0f}" if speeds else "–",
    ]  # fmt: skip


def perplexity_section(rows: Sequence[Row], _: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return the section with one picture per text and tokenizer; other perplexities cannot be compared."""
    pictures, tables = [], []
    marks = "Thin lines: seeds; bars, for one seed: 95 %. Values above the frame are in the table."
    heads = {"context": lambda row: f"{row.case['context']:,}", "score": lambda row: row.score}
    for group in _by_text(rows):
        about, drawn = group[0].text[0], [row for row in group if row.score == "perplexity, token"]
        figure = length_figure(by_model(drawn), "context", "context length, tokens", "perplexity per token")
        pictures.append(Picture(figure, f"Perplexity per token by context, on {about}. {marks}"))
        tables.append(score_table(f"Perplexity on {about}", group, heads, folded=True))
    intro = (
        "The same tokens are scored at every context length, each segment from an empty state. The changes in the "
        "table, paired by block, show whether a longer context helps."
    )
    if len(pictures) > 1:
        intro += " Other texts or tokenizers have their own pictures; between tokenizers compare bits per byte."
    return [Section("Perplexity by context length", intro, pictures, [*tables, statement("perplexity")])]


def positions_section(rows: Sequence[Row], by_kind: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return the section with pictures for each text and segment length."""
    pictures, tables = [], []
    bands = "Bands: ± 1 standard error (of the mean over seeds)."
    caption = "The same, averaged over all chunks except the first. Higher loss at the left is due to the border."
    note = (
        "The first tokens of each chunk (how many: under the model's name) are paired with the rest of the chunk. t "
        "and p are given per seed."
    )
    for group in _by_text(rows):
        about, settings = group[0].text[0], {row.model: row.file.record["settings"] for row in reversed(group)}
        whole, within = (
            figures.position_curves([row for row in by_kind[name] if row.text == group[0].text])
            for name in ("by_position", "in_chunk")
        )
        chunks = {model: one["chunk"] for model, one in settings.items()}
        panels = figures.panels_figure(whole, chunks, next(iter(settings.values()))["length"])
        pictures.append(Picture(panels, f"Loss by position on {about}. {bands} Grey: others."))
        pictures.append(Picture(figures.within_figure(within), f"{caption} {bands}"))
        tables.append(score_table(
            f"Loss after chunk borders, on {about}", group, {"score": lambda row: row.score}, notes=[note],
            about=lambda row: "first {first} of {chunk}".format(**row.file.record["settings"]),
        ))  # fmt: skip
    intro = "Every segment is read from an empty state. Dotted lines: the tested borders between chunks."
    return [Section("Loss by position", intro, pictures, [*tables, statement("positions")])]


_RETRIEVAL_NAMES = {"passkey": "Passkey", "niah_single_1": "Needle in noise", "niah_single_2": "Needle in texts"}


def retrieval_sections(rows: Sequence[Row], _: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return one section per task, with a map for each haystack and model."""
    intro = (
        "Percentage of samples whose answer contains the hidden number, by length of the text and depth of the needle; "
        "mean over seeds. Lengths are in tokens of each model's tokenizer."
    )
    heads = {
        "length": lambda row: token_count(row.case["length"]), "depth": lambda row: depth_name(row.case["depth"]),
        "score": lambda row: row.score,
    }  # fmt: skip
    sections = []
    for task, of_task in grouped(rows, lambda row: row.text[1]).items():
        maps, tables, name = [], [], _RETRIEVAL_NAMES.get(task)
        for group in _by_text(of_task):
            on = f", in {group[0].text[0]}" if group[0].text[0] else ""
            drawn = by_model(row for row in group if row.score.startswith("string_match"))
            maps += [Picture(figures.map_figure(mine, depth_name), f"{model.label}{on}", small=True)
                     for model, mine in drawn.items()]  # fmt: skip
            title = f"{f'{name} ({task})' if name else task}{on}"
            tables.append(score_table(title, group, heads, PERCENT, folded=True))
        title = f"Retrieval: {name.lower() if name else task}"
        sections.append(Section(title, intro, maps, [*tables, statement("retrieval")]))
    return sections


def depth_name(depth: float | str) -> str:
    return "random" if depth == "random" else f"{100 * float(depth):.3g} %"


def _task_section(title: str, intro: str, unit: Unit, *tables: str) -> Callable[..., list[Section]]:
    def section(rows: Sequence[Row], _: Mapping[str, Sequence[Row]]) -> list[Section]:
        heads = {"task": lambda row: row.case["task"], "data": lambda row: row.case["data"],
                 "metric": lambda row: row.score}  # fmt: skip
        notes = dict.fromkeys(note for row in rows for note in row.file.record.get("notes", []))
        measured = score_table(f"{title}: measured", rows, heads, unit, notes=notes)
        return [Section(title, intro, tables=[measured, *map(published_table, tables)])]

    return section


def synthetic_section(rows: Sequence[Row], _: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return the section with one picture per task, size and chunk size, in which distances can be compared."""
    pictures, tables, x = [], [], "chunks before the question"
    for group in _by_text(rows):
        about, guessing = group[0].text[0], group[0].text[-1]
        pictures.append(Picture(figures.distance_figure(group, x, guessing), f"{about}. Bars: 95 %."))
        note = f"Guessing gives {100 * guessing:.1f} %."
        tables.append(score_table(about, group, {x: lambda row: str(row.case[x])}, PERCENT, notes=[note], folded=True))
    intro = (
        "Small models trained from scratch on one task. If an answer is more chunks before its question than attention "
        "reaches, it must come from the memory or from CEMA."
    )
    return [Section("Synthetic tasks", intro, pictures, tables)]


def speed_section(rows: Sequence[Row], _: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return the section with a picture of each score for each machine and dtype."""
    pictures, tables = [], []
    heads = {"length": lambda row: token_count(row.case["length"]), "score": lambda row: row.score}
    for group in _by_text(rows):
        machine = group[0].text[0]
        for score, mine in grouped(group, lambda row: row.score).items():
            figure = length_figure(by_model(mine), "length", "length of the text, tokens", score)
            caption = f"{score[0].upper()}{score[1:]}, by the length of the text before. Bars, for one file: 95 %."
            pictures.append(Picture(figure, f"{caption} On {machine}."))
        tables.append(score_table(f"Speed on {machine}", group, heads, folded=True))
    intro = "One text at a time. Speeds of other machines and dtypes have their own pictures."
    return [Section("Speed and memory by length", intro, pictures, tables)]


_SECTIONS: Mapping[str, Callable[[Sequence[Row], Mapping[str, Sequence[Row]]], list[Section]]] = {
    "perplexity": perplexity_section,
    "positions": positions_section,
    "retrieval": retrieval_sections,
    "academic": _task_section("Academic tasks", "The tasks of the paper's Table 1, with its shots.", PERCENT,
                              "academic", "academic_1b"),
    "scrolls": _task_section("Questions about long documents", "SCROLLS, asked and scored as in the paper's Table 2.",
                             OF_HUNDRED, "scrolls"),
    "diagnose": synthetic_section,
    "speed": speed_section,
}  # fmt: skip

TABLES = ("training_loss", "academic", "academic_1b", "scrolls")


def published(name: str) -> dict[str, Any]:
    """Return numbers that the paper prints, of its own models, data and scale: one of ``TABLES``, or ``statements``."""
    file = resources.files("gecko.experiments.report") / "published" / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def published_table(name: str) -> Table:
    """Return one of ``TABLES`` as a table that is marked as published."""
    content = published(name)
    columns = [(one["name"], "" if one["shots"] is None else f"{one['shots']} shots") for one in content["columns"]]
    form = ".1f" if content["unit"] == "%" else ".2f"
    rows = [
        [row["model"], *(fact or "not given" for fact in row["facts"]),
         *("" if value is None else format(value, form) for value in row["values"])]
        for row in content["rows"]
    ]  # fmt: skip
    notes = [f"In {content['unit']}: {content['metric']}.", *content["notes"]]
    title = f"{content['title']}: {content['source']} of the paper"
    return Table(title, ["model", *content["facts"], *columns], rows, notes, published=True)


def statement(kind: str) -> Table:
    """Return a statement of the paper without numbers of its own."""
    found = published("statements")[kind]
    return Table(f"{found['source']} of the paper", (), (), [found["text"]], published=True)
