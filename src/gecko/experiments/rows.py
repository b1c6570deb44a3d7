"""Results as one long table: a row for each number of a model, seed and case. Runs that differ only in their seed are
one model."""

from __future__ import annotations

import json
import math
import operator
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gecko.eval.diagnose import PIECE
from gecko.eval.results import Interval, over_rows, over_seeds
from gecko.experiments.inputs import RECIPE, EvaluationFile, Inputs, RunFolder
from gecko.io.files import Record, read_object
from gecko.models import parse_config
from gecko.pages import LineStyle
from gecko.train.metrics import METRICS, read_sessions, seconds_by_step
from gecko.train.run import has_role
from gecko.train.settings import Role, current_fields, flatten
from gecko.train.throughput import flops_per_token

_LONGEST_DIFFERENCE, _TRAINING_POINTS = 30, 50
_NORMS = "norm statistics of"
TEXTS, _SHOWN_DIGITS = "texts", 8
"""Name that stands among a run's settings for the digest of its texts, and digits of it."""
HELD_OUT, TRAINING_LOSS = "held-out loss, nats per byte", "training loss, nats per token"
MEMORY = "peak memory, GiB"
_SYNTHETIC_NAMES = {"mqar": "Associative recall (MQAR)", "selective_copying": "Selective copying",
                    "induction_heads": "Induction heads"}  # fmt: skip

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Model:
    """A model with all its seeds: a column of tables and a line of pictures."""

    label: str
    style: LineStyle
    differences: str = ""
    """Settings that differ from other models of the same recipe."""


class Row(NamedTuple):
    """One number."""

    model: Model
    seed: int | None
    """That of training; None if unknown."""
    evaluation: str
    text: tuple[Any, ...]
    """Label of the measured texts, then the facts that two rows must share to be compared, such as the tokenizer."""
    case: Mapping[str, Any]
    """Case of the evaluation, such as ``{"context": 1024}``."""
    score: str
    value: float
    interval: Interval | None
    n: int
    unit: str
    file: Any
    """The input that holds the number, a ``RunFolder`` or an ``EvaluationFile``."""

    @property
    def place(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Score and case, which are the same for all models and seeds."""
        return self.score, tuple(self.case.items())


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_model(rows: Iterable[Row]) -> dict[Model, list[Row]]:
    return grouped(rows, lambda row: row.model)


def estimate(seeds: Sequence[Row], limits: tuple[float, float] | None = None) -> tuple[float, Interval | None]:
    """Return the mean of a score over its seeds, and its interval.

    With one seed the interval is the evaluation's own; with several it is that of the mean over seeds, cut at the
    ``limits``, which Student's symmetric interval can exceed. If all seeds have the same value, the spread between
    seeds is unknown and the interval spans those of the evaluations.
    """
    values, own = [row.value for row in seeds], [row.interval for row in seeds if row.interval is not None]
    interval = own[0] if own else None
    if len(set(values)) > 1:
        interval = over_seeds(values)
        if interval is not None and limits is not None:
            low, high = max(limits[0], interval.low), min(limits[1], interval.high)
            interval = Interval(low, high, f"{interval.method}, cut at 0 and 100 %")
    elif len(values) > 1 and own:
        method = f"equal for all seeds: widest of each seed's ({own[0].method})"
        interval = Interval(min(one.low for one in own), max(one.high for one in own), method)
    return statistics.fmean(values), interval


class Identity(NamedTuple):
    """Name and settings of a model, which are the same for all its seeds."""

    name: str
    settings: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any]) -> Identity:
        known = ((key, json.dumps(value)) for key, value in settings.items() if value is not None)
        return cls(name, tuple(sorted(known)))


def identity_of_run(run: RunFolder) -> Identity:
    """Return the identity of a run: its name is the recipe's, or MODEL in a comparison's folder MODEL/seed-N."""
    folder, source = run.folder.resolve(), str(run.recipe.get("recipe") or "")
    name = folder.name if not source or source.endswith(".json") else source
    if folder.name == f"seed-{run.seed}" and folder.parent.name:
        name = folder.parent.name
    settings = flatten({key: value for key, value in current_fields(run.recipe).items() if key != "command"})
    known = {key: value for key, value in settings.items() if not has_role(key, Role.NEUTRAL)}
    return Identity.of(name, known | {TEXTS: run.texts and run.texts[:_SHOWN_DIGITS]})


def identity_of_evaluation(file: EvaluationFile, runs: Sequence[RunFolder]) -> tuple[Identity, int | None]:
    """Return identity and seed of the run that has the file in its folder, or that its model names: by path, by the
    end of its path, or a run that exists there. Otherwise the name is the model's own."""
    if file.kind == "diagnose":
        return Identity.of("", flatten(file.record["settings"])), int(file.record["seed"])
    name = Path(str(file.record["model"].get("name", file.path.stem)))
    parts = tuple(part for part in name.parts if part not in ("..", "."))
    found = [file.run] if file.run else [run for run in runs if run.folder.resolve() == name.resolve()]
    found = found or [run for run in runs if parts and run.folder.resolve().parts[-len(parts) :] == parts]
    if not found and (name / RECIPE).is_file() and (name / METRICS).is_file():
        found = [RunFolder(name, read_object(name / RECIPE, "a recipe"), sessions=read_sessions(name))]
    if len(found) == 1:
        return identity_of_run(found[0]), found[0].seed
    start, _, number = name.name.partition("-")
    known = {"config": file.record["model"].get("config")}
    if start == "seed" and number.isdecimal() and name.parent.name:
        return Identity.of(str(name.parent), known), int(number)
    return Identity.of(str(name), known), None


def label_models(identities: Iterable[Identity]) -> dict[Identity, Model]:
    """Return models by identity. Labels are recipes; models of the same recipe are told apart by their differences."""
    known = list(dict.fromkeys(identities))
    labels = dict[Identity, tuple[str, str]]()
    for group in grouped(known, lambda one: one.name).values():
        labels |= zip(group, _labels(group), strict=True)
    return {one: Model(labels[one][0], LineStyle.of(number), labels[one][1]) for number, one in enumerate(known)}


def _labels(group: Sequence[Identity]) -> list[tuple[str, str]]:
    """Return label and differences of each model of the same name."""
    name, settings = group[0].name, [dict(one.settings) for one in group]
    if len(group) == 1:
        return [(name or "Gecko", "")]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if len({one.get(key) for one in settings}) > 1]
    if len({tuple(one.get(key) for key in differing if key != TEXTS) for one in settings}) == len(settings):
        differing = [key for key in differing if key != TEXTS]
    ends = [key.rpartition(".")[2] for key in differing]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(differing, ends, strict=True)}
    values = [{short[key]: one.get(key, "none").strip('"') for key in differing} for one in settings]
    texts = [", ".join(f"{key}={value}" for key, value in one.items()) for one in values]
    if all(len(text) <= _LONGEST_DIFFERENCE for text in texts):
        return [(f"{name}, {text}" if name else text, text) for text in texts]
    return [(f"{name or 'model'} {_letters(number)}", text) for number, text in enumerate(texts)]


def _letters(number: int) -> str:
    return ("" if number < 26 else _letters(number // 26 - 1)) + chr(ord("A") + number % 26)


def families(rows: Sequence[Row], shared: Callable[[str], bool]) -> dict[Model, list[Row]]:
    """Return the rows of runs by family: models that have equal settings of the names that are ``shared``.

    A family has the shortest of their names, and a style of its own.
    """
    of_model = {model: identity_of_run(mine[0].file) for model, mine in by_model(rows).items()}
    groups = grouped(of_model, lambda model: tuple(one for one in of_model[model].settings if shared(one[0])))
    found = {
        Identity(min((of_model[model].name for model in models), key=len), settings): models
        for settings, models in groups.items()
    }
    labels = label_models(found)
    return {labels[one]: [row for row in rows if row.model in models] for one, models in found.items()}


def long_table(inputs: Inputs) -> list[Row]:
    """Return the rows of all inputs. What is there twice is noted as left out."""
    known = [(file, *identity_of_evaluation(file, inputs.runs)) for file in inputs.evaluations]
    runs = {id(run): identity_of_run(run) for run in inputs.runs}
    models = label_models([*runs.values(), *(one for file, one, _ in known if file.kind != "diagnose")])
    rows: list[Row] = []
    trained: dict[tuple[Identity, int], RunFolder] = {}
    for run in inputs.runs:
        first = trained.setdefault((runs[id(run)], run.seed), run)
        if first is run:
            rows += rows_of_run(run, models[runs[id(run)]])
        else:
            inputs.leave_out(run.folder, f"trained like {first.folder}, with the same seed")
    # Models of synthetic tasks are told apart within each task.
    tasks = grouped(known, lambda one: one[0].record["settings"]["task"] if one[0].kind == "diagnose" else None)
    for task, group in tasks.items():
        named, found = models if task is None else label_models(one for _, one, _ in group), dict[Any, Row]()
        for row in (row for file, one, seed in group for row in rows_of_evaluation(file, named[one], seed)):
            key = (row.model, row.seed, row.evaluation, row.text, row.place)
            if found.setdefault(key, row) is not row:
                inputs.leave_out(row.file.path, f"{row.evaluation}: some scores are of a model and seed shown already")
        rows += found.values()
    return rows


def rows_of_run(run: RunFolder, model: Model) -> Iterator[Row]:
    """Yield the losses by step, the final losses, the median speed and the number of steps of a run."""
    data = run.recipe["data"]
    facts = sorted((key, str(value)) for key, value in data.items() if value is not None)
    text = data_words(data), str(facts), run.texts

    def row(score: str, value: float, n: int, unit: str, case: Mapping[str, float], own: Interval | None = None) -> Row:
        return Row(model, run.seed, "training", text, case, score, value, own, n, unit, run)

    clock, steps = seconds_by_step(run.metrics, run.tokens_before), [x for x in run.metrics if x["kind"] == "train"]
    held_out = [
        (one["step"], one["nats_per_byte"], one.get("tokens", 1))
        for one in run.metrics if one["kind"] == "validation" and one.get("nats_per_byte") is not None
    ]  # fmt: skip
    training = _training(steps, run.recipe.get("steps"))
    for score, unit, points in ((HELD_OUT, "tokens", held_out), (TRAINING_LOSS, "steps", training)):
        for step, loss, n in points:
            case: dict[str, float] = {"step": step, "tokens": run.tokens_before(step)}
            yield row(score, loss, n, unit, case | ({"minutes": clock[step] / 60} if step in clock else {}))
    if run.results is not None:
        # Older results have no losses by row.
        losses, targets = run.results.get("row_losses") or [], run.results.get("row_targets") or []
        loss, n = float(run.results["loss"]), run.results["tokens"]
        interval = over_rows(losses, targets, 1.0) if math.isfinite(loss) else None
        flops = training_flops(run)
        for score, value in (("nats per byte", float(run.results["nats_per_byte"])), ("nats per token", loss)):
            if not math.isfinite(value):
                continue
            own = interval and interval.map(partial(operator.mul, value / loss))
            yield row(score, value, n, "tokens", {} if flops is None else {"FLOPs": flops}, own)
    length: Mapping[str, float] = {"length": int(run.recipe["sequence_length"])}
    for score, name, combined in (("tokens/s", "tokens_per_second", statistics.median), (MEMORY, "memory_gib", max)):
        values = [one[name] for one in steps if one.get(name)]
        if values:
            yield row(score, combined(values), len(values), "steps", length)
    yield row("steps", run.steps_done, 1, "runs", {})


def training_flops(run: RunFolder) -> float | None:
    """Return the FLOPs of all steps; None if they are not known, as of trained weights."""
    if run.recipe.get("init_from") is not None:
        return None
    try:
        config = parse_config(run.recipe.get("model"), "model", texts=False)
        return flops_per_token(config, int(run.recipe["sequence_length"])) * run.tokens_before(run.steps_done)
    except (ImportError, ValueError):  # a Llama without its package, or a recipe of other code
        return None


def data_words(data: Mapping[str, Any]) -> str:
    """Return the texts that a run reads, and the held-out ones, in words."""
    sources = ", ".join(data.get("sources") or [str(data.get("source"))])
    held_out = data.get("validation")
    apart = f"held out: {held_out}" if held_out else f"{data.get('validation_fraction')} held out"
    return f"{sources} ({apart}; tokenizer {data.get('tokenizer')})"


def _training(steps: Sequence[Record], planned: int | None) -> Iterator[tuple[int, float, int]]:
    """Yield step, mean loss and steps of each complete fiftieth of the run, at its middle step.

    The steps depend only on the run's length, so all seeds have the same steps.
    """
    last = max((record["step"] for record in steps), default=0)
    width = max(1, (planned or last) // _TRAINING_POINTS)
    measured = [record for record in steps if record.get("loss") is not None]
    for group, records in grouped(measured, lambda record: (record["step"] - 1) // width).items():
        if (group + 1) * width <= last:
            middle = group * width + width // 2 + 1
            yield middle, statistics.fmean(record["loss"] for record in records), len(records)


def rows_of_evaluation(file: EvaluationFile, model: Model, seed: int | None) -> Iterator[Row]:
    """Yield the scores of a result file. One with several kinds of norm statistics is of several models."""
    scores = file.record["scores"]
    kinds = list(dict.fromkeys(str(score["where"].get(_NORMS, "")) for score in scores))
    for kind in kinds:
        mine = [score for score in scores if score["where"].get(_NORMS, "") == kind]
        details = file.record["details"][kind] if kind else file.record["details"]
        of = model
        if kind != kinds[0]:
            style = replace(model.style, dashes=(0, (3, 1, 1, 1, 1, 1)), marker="*")
            of = replace(model, label=f"{model.label}, norms of the {kind}", style=style)
        text = _compared(file, details, mine[0]["n"])
        for one in mine:
            interval = None if one["interval"] is None else Interval(**one["interval"])
            yield Row(of, seed, file.kind, text, _case(file, one["where"]), one["name"], float(one["value"]), interval,
                      int(one["n"]), one["unit"], file)  # fmt: skip
        for name in ("by_position", "in_chunk") if file.kind == "positions" else ():
            for point in details[name]:
                mean, error = point["mean"], point["standard_error"]
                interval = None if error is None else Interval(mean - error, mean + error, "± 1 standard error")
                yield Row(of, seed, name, text, {"position": point["position"]}, "loss", mean, interval, point["n"],
                          "segments", file)  # fmt: skip


_DATA = {"limit": "first {:,}", "shots_data": "shots of {}", "new_tokens": "answers of {:,} tokens"}
"""Words for the settings that may differ between evaluations of a task."""


def _case(file: EvaluationFile, where: Mapping[str, Any]) -> dict[str, Any]:
    if file.kind == "positions":  # each model has its own chunks, which are named under its name
        return {}
    case, settings = {name: value for name, value in where.items() if name != _NORMS}, file.record["settings"]
    if file.kind in ("academic", "scrolls"):
        given = [form.format(settings[name]) for name, form in _DATA.items() if settings.get(name) is not None]
        case["data"] = ", ".join([settings.get("data", "not recorded") or "hub", *given])
    return case


def _compared(file: EvaluationFile, details: Mapping[str, Any], n: int) -> tuple[Any, ...]:
    """Return what must be equal for scores to be compared; first the words for it."""
    settings, tokenizer = file.record["settings"], str(file.record["model"].get("tokenizer", "not known"))
    texts = tuple(Path(text).name for text in settings.get("texts", ()))
    named = ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
    if file.kind == "perplexity":
        return f"{named} ({n:,} tokens, tokenizer {tokenizer})", texts, tokenizer, details.get("bytes"), n
    if file.kind == "positions":
        length, segments = settings["length"], settings["segments"]
        amount = f"{segments:,} segments of {token_count(length)} tokens"
        return f"{named} ({amount}, tokenizer {tokenizer})", texts, tokenizer, length, segments
    if file.kind == "retrieval":  # depths may differ: each is a row
        return named, settings["task"], texts, details.get("words")
    if file.kind == "speed":
        return "; ".join([*file.record.get("hardware", {}).values(), str(file.record["model"].get("dtype"))]), ""
    if file.kind == "diagnose":
        size, chunk = settings["size"], settings["config"].get("chunk_size", PIECE)
        about = (
            f"{_SYNTHETIC_NAMES.get(settings['task'], settings['task'])}, {size['length']} tokens, {size['items']} to "
            f"remember, chunks of {chunk}, {settings['steps']:,} steps"
        )
        return about, settings["task"], json.dumps(size, sort_keys=True), chunk, settings["steps"], settings["guessing"]
    return ("",)


def token_count(tokens: int) -> str:
    """Format a number of tokens as commands accept it, such as ``16K`` or ``4M``."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
