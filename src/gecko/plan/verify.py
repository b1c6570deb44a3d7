"""Check of a plan by dry runs of the whole model: whether the ranks' collectives fit together, and the memory of each.

The plan measures one rank, and a few blocks. The graphs that ``torch.compile`` makes of blocks are counted, too.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from gecko.config import GeckoConfig
from gecko.models import ModelConfig, build_model
from gecko.parallel.mesh import MeshSizes
from gecko.plan import Plan
from gecko.plan.device import Agreement, Peak, check_traces
from gecko.plan.dry_run import check_kernels, dry_step
from gecko.train import Run
from gecko.train.model import compile_block

__all__ = ["Verification", "graph_count", "representatives", "verify"]

TOLERANCE = 0.01
"""Accepted difference of the plan's memory from that of the rank that needs most, whose rows hold other documents."""
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class Verification:
    """Results of the dry runs of a plan."""

    plan: Plan
    ranks: tuple[int, ...]
    """Ranks that were run."""
    peak: Peak
    """Memory of the rank that needs most."""
    agreement: Agreement
    graphs: dict[int, int]
    """Number of compiled graphs by depth; empty if the run does not compile."""
    seconds: float
    host_bytes: int
    """Most memory that the process had."""

    @property
    def planned(self) -> int:
        """Bytes of the plan without the reserve, which a dry run does not see."""
        return sum(size for part, size in self.plan.memory.items() if part != "reserve")

    @property
    def difference(self) -> float:
        """Planned bytes over those of the dry run, minus 1."""
        return self.planned / self.peak.total - 1

    @property
    def passed(self) -> bool:
        return abs(self.difference) <= TOLERANCE and len(set(self.graphs.values())) <= 1


def representatives(sizes: MeshSizes) -> tuple[int, ...]:
    """Return ranks at corners of the mesh: all that share a row of the first and last shard of the first copy, and of
    the last shard of the last copy. So two members of a process group of every kind are among them."""
    rows = {0, sizes.shard - 1, sizes.data_ranks - 1}
    return tuple(row * sizes.context + part for row in sorted(rows) for part in range(sizes.context))


def verify(plan: Plan) -> Verification:
    """Run one step of ``plan.run`` for the ``representatives`` of its mesh. Raise ValueError if the ranks' collectives
    or messages do not fit together, ImportError if Triton is missing."""
    check_kernels()
    begin, run = time.perf_counter(), plan.run
    steps = {rank: dry_step(run, plan.sizes, rank) for rank in representatives(plan.sizes)}
    agreement = check_traces({rank: trace for rank, (_, trace) in steps.items()})
    peak = max((memory.peak() for memory, _ in steps.values()), key=lambda peak: peak.total)
    depths = {min(FEWEST_LAYERS, run.model.num_layers), run.model.num_layers} if run.compile else set()
    graphs = {depth: graph_count(run, depth) for depth in sorted(depths)}
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Verification(plan, tuple(steps), peak, agreement, graphs, time.perf_counter() - begin, host)


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
