"""Dry run: one step of a run's real training code on this machine, without GPUs, for some ranks of its mesh.

It shows the memory that the step needs, which the plan only estimates, and whether the ranks' collectives fit together.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.parallel.mesh import MeshSizes
from gecko.plan import Plan
from gecko.plan.dry_run.graphs import graph_count
from gecko.plan.dry_run.ledger import Peak
from gecko.plan.dry_run.rank import dry_step
from gecko.plan.dry_run.trace import Agreement, check_traces

__all__ = ["DryRun", "representatives", "verify"]

TOLERANCE = 0.1
"""Difference of the plan's memory from that of the dry run that is accepted."""
FEWEST_LAYERS = 2


@dataclass(frozen=True)
class DryRun:
    """Results of the dry run of a plan."""

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


def verify(plan: Plan) -> DryRun:
    """Run one step of ``plan.run`` for the ``representatives`` of its mesh.

    Raises:
        ValueError: the ranks' collectives or messages do not fit together.
        ImportError: Triton is missing; without it operators choose what they do not choose on a GPU.
    """
    if not triton_kernels_installed():
        raise ImportError("a dry run takes the operators of a GPU, which need Triton: pip install 'gecko-lm[kernels]'")
    begin, run = time.perf_counter(), plan.run
    steps = {rank: dry_step(run, plan.sizes, rank) for rank in representatives(plan.sizes)}
    agreement = check_traces({rank: step.trace for rank, step in steps.items()})
    peak = max((step.peak for step in steps.values()), key=lambda peak: peak.total)
    depths = {min(FEWEST_LAYERS, run.model.num_layers), run.model.num_layers} if run.compile else set()
    graphs = {depth: graph_count(run, depth) for depth in sorted(depths)}
    return DryRun(plan, tuple(steps), peak, agreement, graphs, time.perf_counter() - begin, _host_bytes())


def _host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
