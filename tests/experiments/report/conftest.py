"""Two models with two seeds each, trained for a few steps, and every evaluation of them on a short text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import words, write_corpus
from typer.testing import CliRunner

from gecko.cli import app
from gecko.config import GeckoConfig
from gecko.data import ByteTokenizer
from gecko.eval import Results, Score
from gecko.eval.results import wilson
from gecko.eval.scrolls import Question, QuestionSet, scrolls
from gecko.train import CheckpointSettings, DataSettings, EvaluationSettings, OptimizerSettings, Run, SampleSettings
from gecko.train import train as run_training

GECKO = GeckoConfig(
    vocab_size=264, num_layers=1, model_dim=16, key_dim=8, value_dim=16, num_heads=1, ffn_dim=16,
    cema_modes=2, chunk_size=8, timestep_groups=2,
)  # fmt: skip
MODELS = {
    "small_gecko": GECKO,
    "small_chunk": dataclasses.replace(GECKO, attention="chunk", memory="none", timestep_betas=None, chunk_size=16),
}
SEEDS, STEPS = (0, 1), 12


def gecko(*arguments: object) -> Any:
    """Run ``gecko …`` in this process and assert that it succeeds."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def small_run(corpus: Path, output: Path, recipe: str, seed: int) -> Run:
    return Run(
        model=MODELS[recipe], output=str(output), data=DataSettings(source=str(corpus), validation_fraction=0.2),
        batch_size=2, sequence_length=32, steps=STEPS, optimizer=OptimizerSettings(learning_rate=1e-2),
        evaluation=EvaluationSettings(every=3, rows=4, final_rows=8), checkpoint=CheckpointSettings(every=100, keep=1),
        sample=SampleSettings(prompt="red ", tokens=4), threads=1, seed=seed, recipe=recipe,
    )  # fmt: skip


def share_score(name: str, hits: int, n: int, unit: str, where: dict[str, Any]) -> Score:
    return Score(name, hits / n, n, unit, wilson(hits, n), where)


def save(path: Path, evaluation: str, model: Path, scores: list[Score]) -> None:
    """Write a result file as the evaluations with large data sets do."""
    described = {"name": str(model), "parameters": 1, "tokenizer": "bytes", "config": {}}
    results = Results(evaluation, scores, {"data": None, "limit": None}, 0)
    results.save(path, described, f"gecko eval {evaluation}", {"Memory": "1"})


class SaysRed:
    """A ``ScoredModel`` that gives one answer to all questions."""

    tokenizer = ByteTokenizer()

    def read(self, tokens: Any, after: None = None) -> None: ...

    def write(self, after: None, max_new_tokens: int, stops: Any = ()) -> str:
        return "Red."


def save_story(path: Path, model: Path) -> None:
    """Write the results of ``gecko eval scrolls`` for a model that answers 3 of 10 questions correctly."""
    questions = [Question("A story.", f"Which, {number}?", ("red" if number < 3 else "blue",)) for number in range(10)]
    described = {"name": str(model), "parameters": 1, "tokenizer": "bytes", "config": {}}
    data = QuestionSet("story.jsonl", questions)
    scrolls(SaysRed(), "narrative_qa", data).save(path, described, "gecko eval scrolls", {"Memory": "1"})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", 12)


@pytest.fixture(scope="session")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of MODEL/seed-N, each with perplexity results in its ``eval/``; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "book.txt").write_text(words(500), encoding="utf-8")
    for recipe in MODELS:
        for seed in SEEDS:
            run = small_run(corpus, folder / recipe / f"seed-{seed}", recipe, seed)
            run_training(run)
            out = run.folder / "eval"
            gecko("eval", "perplexity", run.folder, folder / "book.txt", "--lengths", "64,256,1K",
                  "--out", out / "perplexity.json")  # fmt: skip
            gecko("eval", "positions", run.folder, folder / "book.txt", "--length", 128, "--chunk", 16,
                  "--out", out / "positions.json")  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def results(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write result files outside of the run folders: retrieval, tasks, synthetic tasks."""
    folder = tmp_path_factory.mktemp("results")
    one = runs / "small_gecko" / "seed-0"
    gecko("eval", "retrieval", one, "passkey", "--lengths", "900,1K", "--depths", "0,1", "--samples", 2,
          "--out", folder / "passkey.json")  # fmt: skip
    save(folder / "piqa.json", "academic", one, [share_score("acc", 7, 20, "items", {"task": "piqa"})])
    save_story(folder / "story.json", one)
    for memory in ("adaptive", "none"):
        gecko("eval", "diagnose", "mqar", "steps=2", "size.length=32", "size.vocab_size=16", "size.items=2",
              "model.chunk_size=8", "test_rows=20", f"model.memory={memory}", "--out", folder / f"mqar-{memory}.json",
              )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def inputs(runs: Path, results: Path) -> list[Path]:
    """Return all inputs of the report."""
    return [*sorted(runs.glob("*/seed-*")), *sorted(results.glob("*.json"))]


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Return a function that copies a run folder, without its checkpoints, so that a test may change it."""

    def copy(recipe: str, seed: int) -> Path:
        source, folder = runs / recipe / f"seed-{seed}", tmp_path / recipe / f"seed-{seed}"
        folder.mkdir(parents=True)
        for name in ("recipe.json", "metrics.jsonl", "results.json", "sessions.jsonl"):
            (folder / name).write_bytes((source / name).read_bytes())
        return folder

    return copy
