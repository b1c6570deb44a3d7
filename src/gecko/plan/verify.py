"""Check of a plan by dry runs of the whole model: whether the ranks' collectives fit together, and the memory of each.

The plan measures one rank, and a few blocks.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

from gecko.parallel.mesh import MeshSizes
from gecko.plan import Plan
from gecko.plan.dry_run.depth import check_kernels
from gecko.plan.dry_run.graphs import graph_count
from gecko.plan.dry_run.ledger import Peak
from gecko.plan.dry_run.rank import dry_step
from gecko.plan.dry_run.trace import Agreement, check_traces

__all__ = ["Verification", "representatives", "verify"]

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
    """Run one step of ``plan.run`` for the ``representatives`` of its mesh.

    Raises:
        ValueError: the ranks' collectives or messages do not fit together.
        ImportError: Triton is missing.
    """
    check_kernels()
    begin, run = time.perf_counter(), plan.run
    steps = {rank: dry_step(run, plan.sizes, rank) for rank in representatives(plan.sizes)}
    agreement = check_traces({rank: step.trace for rank, step in steps.items()})
    peak = max((step.peak for step in steps.values()), key=lambda peak: peak.total)
    depths = {min(FEWEST_LAYERS, run.model.num_layers), run.model.num_layers} if run.compile else set()
    graphs = {depth: graph_count(run, depth) for depth in sorted(depths)}
    return Verification(plan, tuple(steps), peak, agreement, graphs, time.perf_counter() - begin, _host_bytes())


def _host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
