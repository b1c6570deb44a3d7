"""Retrieval beyond the attention window: small models are trained on books with needles, and tested with other needles.

    python benchmarks/retrieval.py documents   # needles in books, as runs/needles-CHUNK/*.jsonl
    python benchmarks/retrieval.py train       # gecko train on books and needles, for every model
    python benchmarks/retrieval.py ask         # accuracy by distance, of every trained model
    python benchmarks/retrieval.py page        # results/evidence/retrieval/README.md

A needle, ``[K7]``, gives the number 7 of the letter K, at a random place in a book's prose. When the same needle occurs
again, it is a question: the model must predict what follows ``[K``. ``--chunk`` selects the chunk size of models and
documents. ``train`` can be interrupted, and continues with the same ``--steps``; ``--models`` selects some models. All
paths are relative to the current folder, which must be the same for all commands.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept
import torch
from measuring import parsed, parser_of, table

from gecko import Gecko, load
from gecko.data import load_tokenizer
from gecko.eval.results import Results, Score, share
from gecko.eval.scored_model import describe_model
from gecko.eval.synthetic import SyntheticBatch, hits_by_distance
from gecko.inference.prefill import inference
from gecko.io.checkpoints import checkpoint_step
from gecko.io.files import whole_file
from gecko.ops.loss import IGNORED
from gecko.train import latest_checkpoint

FOLDER = kept.FOLDER / "retrieval"

NEEDLE = "[{key}{value}]"
ANSWER = 2
"""Place of the answer in a needle."""
KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VALUES = 10
PAIRS = 1, 4
"""Range of the number of different needles in a training document."""
TRAINED, TRAINED_CHUNKS, TESTED_CHUNKS = 32_000, 16, (16, 64, 256)
"""Number of training documents, the length of one, which is a row, and lengths of test documents."""
TESTED = {1: 400, 4: 300}
"""Number of test documents per length by their number of needles. In a test document each needle occurs twice, so that
it has one distance."""
AT_ONCE = 8192
"""Tokens read together in a test."""


@dataclass(frozen=True)
class Setting:
    """Chunk size of the models, and the documents that fit it. Attention sees at most two chunks."""

    chunk: int
    mentions: tuple[int, int]
    """Range of how often a needle occurs in a training document."""

    @property
    def runs(self) -> Path:
        return Path(f"runs/needles-{self.chunk}")

    @property
    def length(self) -> int:
        """Tokens of a training document with its start and end."""
        return TRAINED_CHUNKS * self.chunk

    @property
    def tests(self) -> list[tuple[int, int]]:
        """Length in tokens and number of needles of each test."""
        return list(itertools.product((chunks * self.chunk for chunks in TESTED_CHUNKS), TESTED))

    def test_file(self, length: int, asked: int) -> Path:
        return self.runs / f"test-{length}-{asked}.jsonl"


SETTINGS = {8: Setting(8, (2, 6)), 64: Setting(64, (2, 12))}
"""By chunk size. With 8 a short row has many distances beyond the window; 64 is the chunk size of the recipes."""

MODELS: dict[str, tuple[str, ...]] = {
    "gecko": ("compare_gecko",),
    "gecko-long-keys": ("compare_gecko", "model.memory_key_length=5.66"),
    "gecko-longer-keys": ("compare_gecko", "model.memory_key_length=11.31"),
    "no-memory": ("compare_no_memory",),
}
"""Recipe and overrides. 5.66 is the square root of the head dimension, 32; 11.31 is twice that."""
NEEDLES, BOOKS = 0.875, 0.125
"""Shares of the training rows."""
ROWS, RATE = 16, "6e-3"
"""Batch size and learning rate: a quarter of the recipes' batch size, and less than their 8e-3."""
BANDS = ((0, 1), (2, 4), (5, 8), (9, 15), (16, 31), (32, 63), (64, 127), (128, 255))
"""Ranges of chunks between answer and question; from 2 on, attention of one layer does not see the answer."""


def document(texts: Sequence[str], characters: int, pairs: int, mentions: int, rng: random.Random) -> dict[str, Any]:
    """Return prose of one of the texts with needles, each ``mentions`` times.

    The questions are (place of the answer, place of the same digit before), in characters.
    """
    needles = [NEEDLE.format(key=key, value=rng.randrange(VALUES)) for key in rng.sample(KEYS, pairs)]
    length = characters - mentions * sum(map(len, needles))
    text = rng.choice([text for text in texts if len(text) > length])
    first = rng.randrange(len(text) - length)
    prose = text[first : first + length]
    order = [*range(pairs)] * mentions
    rng.shuffle(order)
    parts, seen, questions, written, last = [], dict[int, int](), [], 0, 0
    for cut, needle in zip(sorted(rng.sample(range(len(prose)), len(order))), order, strict=True):
        parts += [prose[last:cut], needles[needle]]
        place = written + cut - last + ANSWER
        if needle in seen:
            questions.append((place, seen[needle]))
        seen[needle] = place
        written, last = written + cut - last + len(needles[needle]), cut
    return {"text": "".join([*parts, prose[last:]]), "questions": questions}


def read_books(folder: Path) -> list[str]:
    """Return the books in ASCII, so that characters are bytes, with single spaces, and brackets only in needles."""
    books = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    if not books:
        raise FileNotFoundError(f"{folder} must hold books as .txt; it has none.")
    plain = [book.encode("ascii", "ignore").decode().translate(str.maketrans("[]", "()")) for book in books]
    return [re.sub(r"\s+", " ", book) for book in plain]


def write_documents(setting: Setting, train: Path, held_out: Path) -> None:
    """Write ``train.jsonl``, and from held-out books a file per length and number of needles."""
    rng, texts = random.Random("train"), read_books(train)
    sizes = ((rng.randint(*PAIRS), rng.randint(*setting.mentions)) for _ in range(TRAINED))
    _write(setting.runs / "train.jsonl", [document(texts, setting.length - 2, *size, rng) for size in sizes])
    texts = read_books(held_out)
    for length, asked in setting.tests:
        rng = random.Random(f"test {length} {asked}")
        documents = [document(texts, length - 1, asked, 2, rng) for _ in range(TESTED[asked])]
        _write(setting.test_file(length, asked), documents)


def _write(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(one) + "\n" for one in documents), encoding="utf-8")


def run_folder(setting: Setting, name: str, seed: int) -> Path:
    return setting.runs / (name if seed == 0 else f"{name}-seed-{seed}")


def train(setting: Setting, models: Sequence[str], steps: int, seed: int, books: str, held_out: str) -> None:
    for name in models:
        recipe, *changes = MODELS[name]
        sources = f"{books}={BOOKS},{setting.runs / 'train.jsonl'}={NEEDLES}"
        command = [
            "train", recipe, "--resume", "--out", str(run_folder(setting, name, seed)), *changes, f"steps={steps}",
            f"seed={seed}",
            f"model.chunk_size={setting.chunk}", f"sequence_length={setting.length}", f"batch_size={ROWS}",
            f"optimizer.learning_rate={RATE}", f"data.sources={sources}", f"data.validation={held_out}",
            "evaluation.rows=16", "evaluation.final_rows=64", "checkpoint.every=50", "checkpoint.keep=10",
        ]  # fmt: skip
        print(shlex.join(["gecko", *command]), flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "gecko", *command], check=True, env=environment)


def ask(setting: Setting, models: Sequence[str], at: int | None, seed: int) -> None:
    torch.set_num_threads(1)
    for name in models:
        folder = run_folder(setting, name, seed)
        checkpoints = folder / "checkpoints"
        checkpoint = latest_checkpoint(checkpoints) if at is None else checkpoints / f"step-{at:08}"
        if checkpoint is None or not checkpoint.exists():
            continue
        model, tokenizer = load(checkpoint), load_tokenizer("bytes")
        steps, run = checkpoint_step(checkpoint), json.loads((checkpoint / "recipe.json").read_text("utf-8"))
        scores = [score for test in setting.tests for score in _scores(model, setting, *test)]
        settings = {
            "recipe": MODELS[name], "steps": steps, "needle": NEEDLE, "guessing": 1 / VALUES,
            "chunk": setting.chunk, "run": run,
        }  # fmt: skip
        kept.keep_results(
            f"retrieval/{folder.name}-chunk-{setting.chunk}-{steps}", Results("needles", scores, settings, run["seed"]),
            f"python benchmarks/retrieval.py ask --chunk {setting.chunk} --models {name} --at {steps} --seed {seed}",
            describe_model(model, tokenizer, name),
        )  # fmt: skip
        print(name, "done", flush=True)


def _scores(model: Gecko, setting: Setting, length: int, asked: int) -> Iterator[Score]:
    found: dict[int, list[bool]] = {}
    for batch in _batches(setting.test_file(length, asked), length):
        with inference(model):
            logits, _ = model(batch.tokens)
        for distance, hits in hits_by_distance(batch, logits.argmax(-1), setting.chunk).items():
            found.setdefault(distance, []).extend(hits)
    for distance, hits in sorted(found.items()):
        value, interval = share(hits)
        where = {"length": length, "needles": asked, "chunks": distance}
        yield Score("accuracy", value, len(hits), "answers", interval, where)


def _batches(test: Path, length: int) -> Iterator[SyntheticBatch]:
    lines = test.read_text(encoding="utf-8").splitlines()
    rows = max(1, AT_ONCE // length)
    start = load_tokenizer("bytes").document_start
    for first in range(0, len(lines), rows):
        records = [json.loads(line) for line in lines[first : first + rows]]
        tokens = torch.tensor([[start, *record["text"].encode()] for record in records])
        targets, sources = torch.full_like(tokens, IGNORED), torch.full_like(tokens, -1)
        for row, record in enumerate(records):
            # The start token shifts all places by one; the question is the token before its answer.
            places, earlier = (torch.tensor(side) for side in zip(*record["questions"], strict=True))
            targets[row, places], sources[row, places] = tokens[row, places + 1], earlier + 1
        yield SyntheticBatch(tokens, targets, sources)


def _description(setting: Setting) -> str:
    needle, window, mentions = NEEDLE.format(key="K", value=7), 2 * setting.chunk, setting.mentions
    return (
        f"Language models of 1 M parameters on bytes, trained on rows of {setting.length:,} bytes, {ROWS} a step. "
        f"{NEEDLES:.1%} of rows are prose of books with {PAIRS[0]} to {PAIRS[1]} needles such as `{needle}`, each "
        f"{mentions[0]} to {mentions[1]} times; the others are books as they are. Then they are asked in books held "
        f"out, where each needle stands twice: which digit is the most likely after the second `{needle[:ANSWER]}`. "
        f"Guessing gives {1 / VALUES:.2f}. A query sees at most {window} bytes by attention in each layer; that is 2 "
        "chunks, so four times that window is 8 chunks, and 16 times is 32."
    )


def page() -> str:
    """Return the results as Markdown tables."""
    found = [kept.read(name) for name in kept.names("retrieval")]
    found.sort(key=lambda one: (one["settings"]["steps"], list(MODELS).index(one["model"]), one["seed"]))
    parts = [
        "# Retrieval past the attention window",
        "Made by `python benchmarks/retrieval.py page` of `../scores.csv.xz`; `../results.csv.xz` has commands, "
        "hardware and versions. Share of right answers [Wilson, 95 %] (n), by chunks between a needle and its "
        "question. Each row is one model: another seed may differ by more.",
    ]
    for setting in SETTINGS.values():
        parts += [f"## Chunks of {setting.chunk}", _description(setting)]
        for length, asked in setting.tests:
            bands = [band for band in BANDS if setting.chunk * band[0] < length]
            rows = []
            for record in found:
                scores = [one for one in record["scores"] if one["where"]["length"] == length]
                if scores and record["settings"]["chunk"] == setting.chunk:
                    mine = [one for one in scores if one["where"]["needles"] == asked]
                    cells = (_cell(mine, *band) for band in bands)
                    rows.append((record["model"], record["seed"], record["settings"]["steps"], *cells))
            if rows:
                columns = ["model", "seed|d", "steps|d", *(f"{low} to {high} chunks|>" for low, high in bands)]
                parts += [f"### Documents of {length:,} bytes, needles: {asked}", table(columns, rows)]
    return "\n\n".join(parts) + "\n"


def _cell(scores: Sequence[dict[str, Any]], low: int, high: int) -> str:
    hits, total = kept.pooled(score for score in scores if low <= score["where"]["chunks"] <= high)
    return kept.share(hits, total, 3) + f" ({total:,})" * bool(total)


def main() -> None:
    parser = parser_of(
        __doc__, write=False, books=("books/train", "a folder of books to train on"),
        held_out=("books/held_out", "a folder of others to ask in"), seed=(0, "of weights and of the order of rows"),
        steps=(400, f"train: of {ROWS} rows of {TRAINED_CHUNKS} chunks"),
    )  # fmt: skip
    parser.add_argument("part", choices=("documents", "train", "ask", "page"))
    parser.add_argument("--chunk", type=int, choices=SETTINGS, default=8, help="chunk size of models and documents")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--at", type=int, help="ask: after this many steps (a multiple of 50), not after the last")
    given = parsed(parser)
    setting = SETTINGS[given.chunk]
    if given.part == "documents":
        write_documents(setting, Path(given.books), Path(given.held_out))
    elif given.part == "train":
        train(setting, given.models, given.steps, given.seed, given.books, given.held_out)
    elif given.part == "ask":
        ask(setting, given.models, given.at, given.seed)
    else:
        (FOLDER / "README.md").write_text(page(), encoding="utf-8")
        print(page())


if __name__ == "__main__":
    main()
