"""Speed and memory by the length of a text: reading it, and the tokens that continue it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch

from gecko.eval.results import Report, Results, Score, quiet, standard_error, student
from gecko.eval.scored_model import GeckoModel, LlamaModel
from gecko.runtime.tensors import memory_gib

NEW_TOKENS = 33
SCORES = ("tokens read a second", "milliseconds until the first new token", "milliseconds for each further token")


def speed(model: GeckoModel | LlamaModel, lengths: Sequence[int], repeats: int, report: Report = quiet) -> Results:
    """Measure the speed of reading random bytes and writing 33 tokens after them, and the peak memory, by length.

    Each length is measured ``repeats`` times after once for a warm start, the shortest first: on a CPU the peak is that
    of the process so far.
    """
    device, scores, random = next(model.model.parameters()).device, [], torch.Generator().manual_seed(0)
    for length in sorted(set(lengths)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        found = []
        for repeat in range(1 + repeats):
            report(f"length {length:,}: {repeat} of {repeats} repeats")
            text = torch.randint(min(256, model.model.config.vocab_size), (length,), generator=random, device="cpu")
            text[0] = model.tokenizer.document_start
            found.append(_measured(model, text))
        for name, values in zip(SCORES, zip(*found[1:], strict=True), strict=True):
            interval = student(fmean(values), standard_error(values), repeats, f"{repeats} repeats")
            scores.append(Score(name, fmean(values), repeats, "repeats", interval, {"length": length}))
        scores.append(Score("peak memory, GiB", memory_gib(device), 1, "processes", None, {"length": length}))
    return Results("speed", scores, {"repeats": repeats}, 0, ["other work on the machine makes it slower"])


def _measured(model: GeckoModel | LlamaModel, text: torch.Tensor) -> tuple[float, float, float]:
    """Return the ``SCORES`` of reading a text and writing new tokens after it."""
    places = [time.perf_counter()]
    after = model.read(text)
    float(after.logits[0])  # a GPU has read the text when its logits are here
    places.append(time.perf_counter())
    for _ in model.stream(after, NEW_TOKENS):  # type: ignore[arg-type]
        places.append(time.perf_counter())
    begin, read, first, *_, last = places
    return len(text) / (read - begin), 1e3 * (first - begin), 1e3 * (last - first) / (NEW_TOKENS - 1)
