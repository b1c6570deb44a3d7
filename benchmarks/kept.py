"""The results from which docs/evidence.md and its pages are made, as three tables in results/evidence.

    python benchmarks/kept.py perplexity/compare_gecko runs/gecko/eval/perplexity.json    # add a result, or replace it

``results.csv.xz`` has a line for each result: command, code, machine, and the settings that pages show; the command
has the others. ``scores.csv.xz`` has a line for each number. Wilson intervals are left out, as they follow from value
and n. An empty cell in columns such as the machine or the score repeats the one above. ``rows.csv.xz`` has the losses
by held-out row from which intervals are computed, a column for each result. A result is a file of ``gecko eval --out``
or of a benchmark, or the ``comparison.json`` of ``gecko compare``.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gecko.eval.results import Results, wilson
from gecko.experiments.rows import grouped
from gecko.train.throughput import describe_hardware

FOLDER = Path(__file__).parent / "results" / "evidence"
_SETTINGS = ("precision", "chunk", "steps", "guessing", "texts", "bytes", "first")
_REPEATED = {
    "results": ("commit", "model", "seed", "hardware", "notes", "settings"), "rows": (),
    "scores": ("name", "score", "keys", "unit", "method"),
}  # fmt: skip
"""Columns in which an empty cell repeats the one above."""
_JOINT = "; "
_DIGITS, _ROW_DIGITS, _SHARE_DIGITS = 7, 6, 4

Record = dict[str, Any]
"""A result as in its file, as far as it is kept."""


@functools.cache
def _table(table: str) -> list[dict[str, str]]:
    path = FOLDER / f"{table}.csv.xz"
    if not path.exists():
        return []
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        lines, above = list(csv.DictReader(file)), dict[str, str]()
    for line in lines:
        above |= {column: line[column] for column in _REPEATED[table] if line[column]}
        line |= above
    return lines


@functools.cache
def _scores() -> dict[str, list[dict[str, str]]]:
    return grouped(_table("scores"), lambda line: line["name"])


def names(folder: str) -> list[str]:
    """Return the names of the results in a folder, in the order of the table."""
    return [line["name"] for line in _table("results") if line["name"].startswith(f"{folder}/")]


def read(name: str) -> Record:
    """Return a result: ``model``, ``command``, ``commit``, ``hardware``, ``settings``, ``notes``, ``scores``, ``rows``.

    Raises:
        KeyError: there is no such result.
    """
    line = next((one for one in _table("results") if one["name"] == name), None)
    if line is None:
        raise KeyError(f"{FOLDER} must hold a result of the name {name}; it has none.")
    record: Record = {key: json.loads(line[key]) for key in ("model", "hardware", "settings", "notes", "seed")}
    rows = [float(row[name]) for row in _table("rows") if row.get(name)]
    scores = [_score(one) for one in _scores().get(name, [])]
    return {"command": line["command"], "commit": line["commit"], **record, "scores": scores, "rows": rows}


def comparison(name: str) -> Record:
    """Return a result of ``gecko compare`` with its ``recipes`` and ``runs``, as in ``comparison.json``."""
    record = read(name)
    recipes: dict[str, Record] = {}
    runs: dict[tuple[str, int], Record] = {}
    for score in record["scores"]:
        where, value = score["where"], score["value"]
        recipe = recipes.setdefault(
            where["recipe"], {"recipe": where["recipe"], "difference": None, "difference_interval": None}
        )
        if "seed" not in where and "learning_rate" not in where:
            recipe |= {score["name"]: value, f"{score['name']}_interval": score["interval"]}
        elif "seed" in where:
            run = runs.setdefault((where["recipe"], where["seed"]), {**where, "curve": []})
            if "tokens" in where:
                run["curve"].append({"step": where["tokens"], **where, score["name"]: value})
            else:
                run[score["name"]] = value
    parameters = {run["recipe"]: int(run["parameters"]) for run in runs.values()}
    return {**record, "seeds": record["seed"], "parameters": parameters, "recipes": list(recipes.values()),
            "runs": list(runs.values())}  # fmt: skip


def _score(line: Mapping[str, str]) -> Record:
    interval, own = None, "" if "95 %" in line["method"] else _over(int(line["n"]), line["unit"])
    if line["low"]:
        interval = {"low": float(line["low"]), "high": float(line["high"]), "method": line["method"] + own}
    where = dict(zip(line["keys"].split(_JOINT), map(_value, line["case"].split(_JOINT)), strict=True))
    where.pop("-", None)
    value = float(line["value"] or "nan")
    return {"name": line["score"], "value": value, "interval": interval, "n": int(line["n"]), "where": where}


def _over(n: int, unit: str) -> str:
    """Return the end of the name of a method, which is left out in the table if it follows from the sample."""
    return f" over {n:,} {unit}, 95 %"


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def pooled(scores: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the numbers of right answers and of all answers of several scores."""
    found = list(scores)
    return sum(round(one["value"] * one["n"]) for one in found), sum(one["n"] for one in found)


def share(hits: int, total: int, digits: int) -> str:
    """Return a share of right answers with Wilson's interval as text."""
    if total == 0:
        return "none"
    interval = wilson(hits, total)
    return f"{hits / total:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def keep_results(name: str, results: Results, command: str, model: Mapping[str, Any] | None = None) -> None:
    """Add results that were measured on this machine's processor to the tables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        results.save(path, model or {}, command, describe_hardware(torch.device("cpu")))
        keep(name, path)


def keep(name: str, path: Path) -> None:
    """Add the result in the file ``path`` to the tables, or replace the one of this name."""
    record = json.loads(path.read_text(encoding="utf-8"))
    compared = "recipes" in record
    results = [dict(line) for line in _table("results")]
    rows = [{column: loss for column, loss in row.items() if column != name} for row in _table("rows")]
    line = next((one for one in results if one["name"] == name), None)
    if line is None:
        line = {"name": name}
        results.append(line)
    kept = {
        "model": record.get("model", {}).get("name"), "seed": record["seeds" if compared else "seed"],
        "hardware": record["hardware"], "notes": record["notes"],
        "settings": {key: value for key, value in record["settings"].items() if key in _SETTINGS},
    }  # fmt: skip
    # Where an evaluation was written does not matter.
    command = record["command"] if compared else re.sub(r" (--out|-o) \S+", "", record["command"])
    line |= {"command": command, "commit": record["commit"] or "unknown"}
    line |= {key: json.dumps(value, ensure_ascii=False) for key, value in kept.items()}
    scores = list(_scores_of_comparison(record)) if compared else record["scores"]
    kept_scores = [one for one in _table("scores") if one["name"] != name] + [_line(name, score) for score in scores]
    losses = (record.get("details") or {}).get("rows", [])
    rows += [{} for _ in range(len(losses) - len(rows))]
    for row, loss in zip(rows, losses, strict=False):
        row[name] = f"{loss:.{_ROW_DIGITS}g}"
    _write("results", results)
    _write("scores", sorted(kept_scores, key=lambda one: one["name"]))
    _write("rows", rows)
    _table.cache_clear()
    _scores.cache_clear()


def _line(name: str, score: Mapping[str, Any]) -> dict[str, str]:
    interval, value = score["interval"], score["value"]
    method = "none" if interval is None else interval["method"].removesuffix(_over(score["n"], score["unit"]))
    wilson = method.startswith("Wilson")
    ends = ("", "") if interval is None or wilson else (interval["low"], interval["high"])
    digits = _SHARE_DIGITS if wilson else _DIGITS
    value, low, high = (f"{x:.{digits}g}" if isinstance(x, float) else x for x in (value, *ends))
    where = score["where"] or {"-": "-"}
    if any(_JOINT in str(text) for text in (*where, *where.values())):
        raise ValueError(
            f"names and values of cases must be without {_JOINT!r}, which stands between them; got {where}."
        )
    return {
        "name": name, "score": score["name"], "keys": _JOINT.join(where), "unit": score["unit"], "method": method,
        "case": _JOINT.join(map(str, where.values())), "value": "" if value is None else str(value), "low": low,
        "high": high, "n": str(score["n"]),
    }  # fmt: skip


def _scores_of_comparison(record: Mapping[str, Any]) -> Iterator[Record]:
    def score(name: str, value: float | None, n: int, unit: str, interval: Any = None, **where: Any) -> Record:
        return {"name": name, "value": value, "n": n, "unit": unit, "interval": interval, "where": where}

    for one in record["recipes"]:
        recipe, several = one["recipe"], len(one["seeds"]) > 1
        count = (len(one["seeds"]), "seeds") if several else (_rows(one["interval"]), "held-out rows")
        yield score("nats_per_byte", one["nats_per_byte"], *count, one["interval"], recipe=recipe)
        if one["difference"] is not None:
            yield score("difference", one["difference"], *count, one["difference_interval"], recipe=recipe)
    for run in record["runs"]:
        where = {"recipe": run["recipe"], "seed": run["seed"]}
        yield score("nats_per_byte", run["nats_per_byte"], run["held_out_tokens"], "tokens", **where)
        for name in ("parameters", "tokens", "tokens_per_second"):
            yield score(name, run[name], 1, "runs", **where)
        for point in run["curve"]:
            place = {"tokens": point["tokens"], "seconds": f"{point['seconds']:.0f}"}
            yield score("nats_per_byte", point["nats_per_byte"], 1, "runs", **where, **place)
    for trial in (record["tuning"] or {"trials": []})["trials"]:
        place = {"recipe": trial["recipe"], "learning_rate": trial["learning_rate"]}
        yield score("nats_per_byte", trial["nats_per_byte"], trial.get("tokens") or 1, "tokens", **place)


def _rows(interval: Mapping[str, Any] | None) -> int:
    """Return the number of rows in the name of a method such as ``bootstrap over 768 held-out rows, 95 %``."""
    return 1 if interval is None else int(interval["method"].split()[2].replace(",", ""))


def _write(table: str, lines: Sequence[Mapping[str, str]]) -> None:
    columns = list(dict.fromkeys(column for line in lines for column in line))
    above: dict[str, str] = {}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for line in lines:
        repeated = [column for column in _REPEATED[table] if above.get(column) == line[column]]
        writer.writerow({**line, **dict.fromkeys(repeated, "")})
        above = dict(line)
    content = lzma.compress(text.getvalue().encode(), preset=9 | lzma.PRESET_EXTREME)
    (FOLDER / f"{table}.csv.xz").write_bytes(content)


if __name__ == "__main__":
    keep(sys.argv[1], Path(sys.argv[2]))
