"""Files of runs and evaluations with numbers that are computed, not trained: the same on every machine."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gecko.config import GeckoConfig
from gecko.pages import Cell, Section
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings

GECKO = GeckoConfig(
    vocab_size=264, num_layers=1, model_dim=16, key_dim=8, value_dim=16, num_heads=1, ffn_dim=16,
    cema_modes=2, chunk_size=8, timestep_groups=2,
)  # fmt: skip
MODELS = {
    "small_chunk": dataclasses.replace(GECKO, attention="chunk", memory="none", timestep_betas=None, chunk_size=16),
    "small_gecko": GECKO,
}
PARAMETERS = {"small_chunk": 10_712, "small_gecko": 10_744}
SEEDS, STEPS = (0, 1), 12
CODE = {"version": "0.1.0", "commit": "0123456789abcdef"}
HARDWARE = {"Processor": "A, 2 cores", "Memory": "8 GiB"}


def small_run(output: Path, recipe: str, seed: int) -> Run:
    return Run(
        model=MODELS[recipe], output=str(output), data=DataSettings(source="texts", validation_fraction=0.2),
        batch_size=2, sequence_length=32, steps=STEPS, optimizer=OptimizerSettings(learning_rate=1e-2),
        evaluation=EvaluationSettings(every=3, rows=4, final_rows=8), checkpoint=CheckpointSettings(every=100, keep=1),
        sample=SampleSettings(prompt="red ", tokens=4), threads=1, seed=seed, recipe=recipe,
    )  # fmt: skip


def level(recipe: str, seed: int) -> float:
    """Return the final loss of a run."""
    return 4.2 + 0.1 * list(MODELS).index(recipe) + (0.03 + 0.02 * list(MODELS).index(recipe)) * seed


def write_run(folder: Path, recipe: str, seed: int) -> Run:
    """Write the files of a finished run."""
    run, final = small_run(folder, recipe, seed), level(recipe, seed)
    folder.mkdir(parents=True)
    run.save(folder / "recipe.json")
    records: list[dict[str, Any]] = [{"kind": "validation", "step": 0, "loss": 6.5, "nats_per_byte": 6.5}]
    for step in range(1, STEPS + 1):
        speed = 480.0 if step % 2 else 960.0
        records.append({"kind": "train", "step": step, "loss": final + 2 / step, "tokens_per_second": speed,
                        "seconds": 10.0 * step})  # fmt: skip
        if step % 3 == 0:
            records.append({"kind": "validation", "step": step, "loss": final + 1 / step,
                            "nats_per_byte": final + 1 / step})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [32 * (final + 0.1 * (row - 3.5)) for row in range(8)]
    results = {"loss": final, "nats_per_byte": final / 2, "loss_by_position": [final] * 32, "bin_width": 1,
               "tokens": 256, "row_losses": rows, "row_targets": [32] * 8, "arithmetic": "float32"}  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    session = {"step": 0, **CODE, "parameters": PARAMETERS[recipe], "hardware": HARDWARE, "data": "digest"}
    (folder / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    return run


def score(
    name: str, value: float, n: int, unit: str, where: Mapping[str, Any], reach: float | None = None,
    method: str = "Student's t over chunks, 95 %",
) -> dict[str, Any]:  # fmt: skip
    interval = None if reach is None else {"low": value - reach, "high": value + reach, "method": method}
    return {"name": name, "value": value, "n": n, "unit": unit, "interval": interval, "where": dict(where)}


def write_result(
    path: Path, evaluation: str, scores: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
    model: Mapping[str, Any], details: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write a result file as ``gecko eval`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "format": "gecko-evaluation-1", **CODE, "evaluation": evaluation, "model": model,
        "command": f"gecko eval {evaluation} <model>", "seed": 0, "hardware": HARDWARE, "settings": settings,
        "scores": scores, "notes": notes, "details": details or {},
    }))  # fmt: skip


def model_of(folder: Path, recipe: str) -> dict[str, Any]:
    return {"name": str(folder), "parameters": PARAMETERS[recipe], "tokenizer": "bytes", "config": {}}


def write_evaluations(folder: Path, recipe: str, seed: int) -> None:
    """Write the evaluations of a run into its ``eval/``."""
    loss, blocks = level(recipe, seed), "bootstrap over 32 blocks of 64 tokens, 95 %"
    scores = []
    for number, context in enumerate((64, 256, 1024)):
        value, where = loss - 0.1 * number, {"context": context}
        scores.append(score("nats a token", value, 2048, "tokens", where, 0.1, blocks))
        scores.append(score("perplexity, token", 10 * value, 2048, "tokens", where, 1.0, blocks))
        if number:
            scores.append(score(f"change from {context // 4}, nats", -0.1, 2048, "tokens", where, 0.02, blocks))
    texts = [f"/books/{name}.txt" for name in ("emma", "dracula", "walden", "ulysses")]
    settings = {"lengths": [64, 256, 1024], "texts": texts, "block": 64}
    model = model_of(folder, recipe)
    write_result(folder / "eval/perplexity.json", "perplexity", scores, settings, model, {"bytes": 2048, "words": 367})
    where = {"chunk": 16, "first": 1}
    scores = [score("nats after a border", loss + 0.2, 147, "chunks", where, 0.1),
              score("nats in the rest", loss, 147, "chunks", where, 0.1),
              score("border minus rest", 0.2, 147, "chunks", where, 0.05),
              score("t", 7.5 + seed, 147, "chunks", where), score("p, two-sided", 1e-9, 147, "chunks", where),
              ]  # fmt: skip
    details = {name: [{"position": place, "mean": loss + 1 / (place + 1), "n": 21, "standard_error": 0.1}
                      for place in range(0, length, 4)] for name, length in (("by_position", 128), ("in_chunk", 16))
               }  # fmt: skip
    settings = {"length": 128, "chunk": 16, "bin": 4, "first": 1, "segments": 21, "texts": ["/books/emma.txt"]}
    write_result(folder / "eval/positions.json", "positions", scores, settings, model, details)


def write_results(folder: Path, model: Mapping[str, Any]) -> None:
    """Write result files outside of the folders of runs: retrieval, tasks, and synthetic tasks."""
    wilson = "Wilson, 95 %"
    scores = [
        score(name, hits, 20, "samples", {"task": "passkey", "length": length, "depth": depth}, 0.2, wilson)
        for length in (900, 1024) for depth in (0.0, 1.0, "random")
        for name, hits in (("string_match_all", 0.5 + length / 4096), ("first number", 0.25))
    ]  # fmt: skip
    settings = {"task": "passkey", "texts": [], "lengths": [900, 1024], "depths": [0.0, 1.0], "samples": 20}
    write_result(folder / "passkey.json", "retrieval", scores, settings, model, {"words": "digest"})
    write_result(folder / "piqa.json", "academic", [score("acc", 0.35, 20, "items", {"task": "piqa"}, 0.19, wilson)],
                 {"data": None, "limit": None}, model, notes=["one item had no answer"])  # fmt: skip
    settings = {"task": "narrative_qa", "data": "story.jsonl", "limit": None, "shots": 0, "shots_data": None,
                "new_tokens": 64}  # fmt: skip
    scores = [score("F1", 30.0, 10, "questions", {"task": "narrative_qa"}, 30.0, "bootstrap over 10 questions, 95 %")]
    write_result(folder / "story.json", "scrolls", scores, settings, model)
    for memory, share in (("adaptive", 0.9), ("none", 0.4)):
        settings = {
            "task": "mqar", "size": {"length": 32, "vocab_size": 16, "items": 2}, "steps": 200, "learning_rate": 3e-3,
            "guessing": 0.125, "config": dataclasses.asdict(dataclasses.replace(GECKO, memory=memory)),
        }  # fmt: skip
        scores = [
            score("accuracy", share - 0.1 * (distance == 3), 20, "answers", {"chunks before the question": distance},
                  0.1, wilson) for distance in ("any", 0, 1, 3)
        ]  # fmt: skip
        write_result(folder / f"mqar-{memory}.json", "diagnose", scores, settings,
                     {"name": "from scratch, mqar", "config": {}, "device": "cpu"})  # fmt: skip


def write_all(folder: Path) -> list[Path]:
    """Write runs with evaluations, and result files; return them in the order in which they are given to a report."""
    for recipe in MODELS:
        for seed in SEEDS:
            run = folder / "runs" / recipe / f"seed-{seed}"
            write_run(run, recipe, seed)
            write_evaluations(run, recipe, seed)
    write_results(folder / "results", model_of(folder / "runs/small_gecko/seed-0", "small_gecko"))
    return [*sorted(folder.glob("runs/*/seed-*")), *sorted(folder.glob("results/*.json"))]


def as_csv(sections: Sequence[Section]) -> str:
    """Return all that sections say, except their pictures, as CSV."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    for section in sections:
        out.writerow(["# section", section.title, section.intro])
        out.writerows(["# picture", picture.caption] for picture in section.pictures)
        for table in section.tables:
            out.writerow(["# published" if table.published else "# table", table.title, f"{table.heads} heads"])
            out.writerows(map(plain, line) for line in ([table.columns] if table.columns else []))
            out.writerows(map(plain, line) for line in table.rows)
            out.writerows(["# note", note] for note in table.notes)
        out.writerows(["# text", one.title, one.lead, one.text] for one in section.texts)
    return text.getvalue()


def plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else " / ".join(filter(None, cell))
