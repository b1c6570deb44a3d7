"""Number of graphs that ``torch.compile`` makes of a run's blocks: one block's graphs serve blocks of any depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gecko.config import GeckoConfig
from gecko.models import ModelConfig, build_model
from gecko.train import Run
from gecko.train.model import compile_block

_LENGTHS = (48, 16), (30, 34)
"""Tokens of the documents of the row, in each of two calls."""


def graph_count(run: Run, depth: int) -> int:
    """Return the number of graphs of two calls of a narrow model of the run's architecture with ``depth`` blocks.

    The model is real and on the CPU, whole rows on one rank: the graphs hold PyTorch's operations in place of kernels.
    PyTorch traces and cuts them as in training, but generates no code. The two calls have other documents.
    """
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build_model(replace(narrowed(run.model), num_layers=depth))
    model.activation_checkpointing = run.activation_checkpointing
    for block in model.blocks:
        compile_block(block, backend=keep)
    try:
        for lengths in _LENGTHS:
            ids = torch.repeat_interleave(torch.tensor(lengths, device="cpu")).unsqueeze(0)
            tokens = torch.zeros_like(ids)
            model.loss(tokens, tokens, ids).backward()
    finally:
        torch.compiler.reset()
    return len(graphs)


def narrowed(config: ModelConfig) -> ModelConfig:
    """Return a config of the same architecture with few features."""
    if isinstance(config, GeckoConfig):
        return replace(
            config, vocab_size=64, model_dim=64, key_dim=32, value_dim=64, num_heads=2, ffn_dim=64, chunk_size=16,
            rope_frequencies=None, sinks=min(config.sinks, 16),
            key_value_heads=None if config.key_value_heads is None else 1,
            timestep_groups=4, norm_groups=min(config.norm_groups, 4), cema_modes=4,
            rope_heads=None if config.rope_heads is None else min(config.rope_heads, 2),
        )  # fmt: skip
    return replace(config, vocab_size=64, model_dim=64, num_heads=2, ffn_dim=64, key_value_heads=None)
