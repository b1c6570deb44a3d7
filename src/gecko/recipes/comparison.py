"""Recipes of the paper's comparison at one million parameters on bytes: Gecko, its ablations, Megalodon and Llama 2.

All recipes differ in the model alone, and their numbers of parameters agree within 2 %. Set ``data.source``. In each, a
query attends to at most 128 tokens, itself included; only the Llama attends to its whole row. Gecko's sliding chunks
have 64 tokens, so a query sees 65 to 128. ``compare_chunk`` has chunks of 128, so a query sees 1 to 128. In
``compare_window`` the window is ``chunk_size``, so a query always sees 128. The memory takes the tokens that leave the
window, so its chunks have 128 tokens in these two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gecko.config import GeckoConfig
from gecko.models.registry import LlamaConfig, ModelConfig
from gecko.train import (
    CheckpointSettings,
    EvaluationSettings,
    OptimizerSettings,
    Run,
    SampleSettings,
    ScheduleSettings,
    SkipSettings,
)


def compare_gecko() -> Run:
    """Gecko of a million parameters on 10 M bytes, the reference of the comparison. Set data.source."""
    return _comparison("compare_gecko", GeckoConfig.preset("tiny"))


def compare_megalodon() -> Run:
    """Megalodon of the same size, as its authors released it."""
    return _comparison("compare_megalodon", GeckoConfig.preset("megalodon-tiny"))


def compare_llama() -> Run:
    """Llama 2 of the same size."""
    return _comparison("compare_llama", LlamaConfig.preset("llama-tiny"))


def compare_chunk() -> Run:
    """Gecko that attends within a chunk."""
    return _gecko("compare_chunk", attention="chunk", chunk_size=128)


def compare_window() -> Run:
    """Gecko that attends to a window of the same length for every token."""
    return _gecko("compare_window", attention="sliding_window", chunk_size=128)


def compare_cumulative() -> Run:
    """Gecko with Megalodon's timestep norm: cumulative statistics of all tokens read."""
    return _gecko("compare_cumulative", timestep_betas=None)


def compare_no_memory() -> Run:
    """Gecko without working memory: only CEMA keeps information about tokens outside the window."""
    return _gecko("compare_no_memory", memory="none")


def compare_linear() -> Run:
    """Gecko with the memory of Infini-attention (linear, delta rule)."""
    return _gecko("compare_linear", memory="linear")


COMPARISON: dict[str, Callable[[], Run]] = {
    recipe.__name__: recipe
    for recipe in (
        compare_gecko, compare_megalodon, compare_llama, compare_chunk, compare_window, compare_cumulative,
        compare_no_memory, compare_linear,
    )
}  # fmt: skip


def _gecko(name: str, **changes: Any) -> Run:
    return _comparison(name, dataclasses.replace(GeckoConfig.preset("tiny"), **changes))


def _comparison(name: str, model: ModelConfig) -> Run:
    """Return a run on 10 M bytes: 1,221 steps of 8,192."""
    return Run(
        model=model,
        output=f"runs/{name}",
        batch_size=4,
        sequence_length=2048,
        steps=1221,
        optimizer=OptimizerSettings(learning_rate=8e-3),
        schedule=ScheduleSettings(kind="cosine", warmup=0.03),
        evaluation=EvaluationSettings(every=200, rows=64, final_rows=768),
        checkpoint=CheckpointSettings(every=200, keep=1),
        sample=SampleSettings(tokens=100),
        skip=SkipSettings(deviations=None),
        threads=1,
    )
