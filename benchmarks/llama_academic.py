"""Short tasks answered by a converted model and by the Llama that it was converted from, in transformers.

    python benchmarks/llama_academic.py models/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --data academic --write

Both have the tokenizer of the converted model and the same prompts. transformers reads the GGUF file itself. Every
task that has ended is kept in the table of ``--out``, and the same command goes on with the next one.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import described, find_model, parsed, parser_of, publish, table
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import gecko
from gecko.data.tokenizers import Tokenizer, load_tokenizer
from gecko.eval.academic import academic
from gecko.eval.scored_model import GeckoModel, Predicted
from gecko.io.fingerprints import fingerprint

TASKS = ("arc_easy", "piqa", "winogrande", "boolq")
COLUMNS = ("side", "task", "metric", "value", "low", "high", "items", "seconds", "longest", "limit", "weights")


@dataclass
class Reading:
    """A context that transformers has read."""

    cache: DynamicCache
    length: int
    logits: Tensor
    """(vocabulary,) of the next token."""


@dataclass
class TransformersModel:
    """The part of ``ScoredModel`` that choices need, by transformers."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    chunk_size: None = None
    longest: int = 0
    """Tokens of the longest prompt with its answer, so far."""

    @torch.inference_mode()
    def read(self, tokens: Tensor, after: None = None) -> Reading:
        found = self.model(tokens[None], past_key_values=(cache := DynamicCache()), use_cache=True, logits_to_keep=1)
        return Reading(cache, len(tokens), found.logits[0, -1].float())

    @torch.inference_mode()
    def predict(self, after: Reading, tokens: Tensor) -> Predicted:
        self.longest = max(self.longest, after.length + len(tokens))
        logits = after.logits[None]
        if len(tokens) > 1:
            found = self.model(tokens[None, :-1], past_key_values=after.cache, use_cache=True)
            after.cache.crop(1 - len(tokens))
            logits = torch.cat([logits, found.logits[0].float()])
        return Predicted(F.cross_entropy(logits, tokens, reduction="none"), logits.argmax(-1) == tokens)


def main() -> None:
    given = _arguments()
    folder = find_model(given.model)
    tokenizer, model = load_tokenizer(folder), gecko.load(folder)
    llama = AutoModelForCausalLM.from_pretrained(given.gguf.parent, gguf_file=given.gguf.name, dtype=torch.float32)
    sides = {"Gecko block": GeckoModel(model, tokenizer, folder.name), "Llama": TransformersModel(llama, tokenizer)}
    where = {"limit": str(given.limit or ""), "weights": fingerprint(model)}
    for task in given.tasks:
        for side, scored in sides.items():
            if not any((row["side"], row["task"]) == (side, task) for row in _table(given.out, where)):
                _add(given, side, task, scored, where)
    found = _table(given.out, where)
    longest = max(int(row["longest"] or 0) for row in found)
    publish(
        "llama_academic.md", given, "Short tasks: a converted Llama beside the Llama", described(model, folder),
        "The Llama is transformers' own reading of the GGUF file, in float32. The longest prompt with its answer has "
        f"{longest:,} tokens, and the window {2 * model.config.chunk_size:,}. Intervals are those of one side; both "
        "sides answer the same items.",
        table(["task", "metric", "items|>", "Gecko block|.2%", "Llama|.2%", "95 % interval", "points apart|+.2f"],
              _rows(found)),
    )  # fmt: skip


def _add(given: argparse.Namespace, side: str, task: str, scored: Any, where: dict[str, str]) -> None:
    begin = time.perf_counter()
    results = academic(scored, [task], data=given.data, limit=given.limit)
    seconds, longest = f"{time.perf_counter() - begin:.0f}", getattr(scored, "longest", "")
    new = not given.out.exists()
    with given.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS] if new else [])
        for score in results.scores:
            assert score.interval is not None, "a task has several items"
            numbers = [f"{number:.6f}" for number in (score.value, score.interval.low, score.interval.high)]
            writer.writerow([side, task, score.name, *numbers, score.n, seconds, longest, *where.values()])


def _table(out: Path, where: dict[str, str]) -> list[dict[str, str]]:
    """Return the lines of the same weights and limit."""
    lines = csv.DictReader(out.read_text(encoding="utf-8").splitlines() if out.is_file() else [])
    return [line for line in lines if where.items() <= line.items()]


def _rows(table: Sequence[dict[str, str]]) -> Iterator[tuple[object, ...]]:
    ours, theirs = ({(r["task"], r["metric"]): r for r in table if r["side"] == s} for s in ("Gecko block", "Llama"))
    for key in sorted(ours.keys() & theirs.keys()):
        value, low, high = (float(ours[key][name]) for name in ("value", "low", "high"))
        other = float(theirs[key]["value"])
        yield *key, ours[key]["items"], value, other, f"{low:.1%} .. {high:.1%}", 100 * (value - other)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("model", help="a folder of gecko convert")
    parser.add_argument("--gguf", type=Path, required=True, help="file of the Llama that it was converted from")
    parser.add_argument("--data", type=Path, required=True, help="folder of files such as piqa_val.arrow")
    parser.add_argument("--tasks", nargs="+", default=TASKS, metavar="TASK")
    parser.add_argument("--limit", type=int, help="only the first items of every task")
    parser.add_argument("--out", type=Path, default=Path("llama_academic.csv"), help="table of the tasks that ended")
    return parsed(parser)


if __name__ == "__main__":
    main()
