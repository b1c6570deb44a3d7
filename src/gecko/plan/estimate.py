"""What a run will take on a cluster: memory, work, traffic and time, before anyone pays."""

from __future__ import annotations

from dataclasses import dataclass

from gecko.parallel.mesh import MeshSizes
from gecko.plan.cluster import GPU
from gecko.plan.communication import Traffic, traffic
from gecko.plan.counts import counts_of
from gecko.plan.memory import Share, group_sizes, step_memory
from gecko.plan.units import Flops
from gecko.train import Run
from gecko.train.utilisation import flops_per_token

DAY = 86_400


@dataclass(frozen=True)
class Assumptions:
    """What no formula says. Measure a hundred steps, and put in what they took."""

    efficiency: float = 0.5
    """Part of the peak that the products reach, all kernels together."""
    overlap: float = 0.8
    """Part of the computing time that communication can hide behind."""


@dataclass(frozen=True)
class Plan:
    """A run on a number of GPUs. Sizes in bytes, times in seconds; of one GPU and one step unless it says otherwise."""

    run: Run
    gpu: GPU
    sizes: MeshSizes
    share: Share
    memory: dict[str, int]
    flops: dict[str, Flops]
    """A token, by part."""
    recomputed: float
    """FLOPs a token of the second forward pass."""
    traffic: dict[str, Traffic]
    assumptions: Assumptions

    @property
    def gpus(self) -> int:
        return self.sizes.replicate * self.sizes.shard * self.sizes.context

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= self.gpu.memory

    @property
    def tokens(self) -> float:
        """Of one GPU."""
        return self.run.tokens_per_step / self.gpus

    @property
    def computing(self) -> float:
        flops = sum(part.total for part in self.flops.values()) + self.recomputed
        return self.tokens * flops / (self.gpu.peak * self.assumptions.efficiency)

    @property
    def communicating(self) -> float:
        return sum(kind.seconds for kind in self.traffic.values())

    @property
    def step_seconds(self) -> float:
        return self.computing + max(0.0, self.communicating - self.assumptions.overlap * self.computing)

    @property
    def utilisation(self) -> float:
        """MFU, as a run would report it."""
        return (
            self.tokens
            * flops_per_token(self.run.model, self.run.sequence_length)
            / (self.step_seconds * self.gpu.peak)
        )

    @property
    def days(self) -> float | None:
        """For all steps; None where the run has no number of steps."""
        return None if self.run.steps is None else self.run.steps * self.step_seconds / DAY


def make_plan(run: Run, gpus: int, gpu: GPU, assumptions: Assumptions) -> Plan:
    """The plan of ``run`` on so many GPUs.

    Raises:
        ValueError: ``run.parallel`` does not multiply to ``gpus``, or the batch does not divide among them.
    """
    for name, value in (("efficiency", assumptions.efficiency), ("overlap", assumptions.overlap)):
        if not 0 < value <= 1:
            raise ValueError(f"--{name} is a fraction and must lie between 0 and 1; got {value}.")
    sizes = MeshSizes.of(gpus, run.parallel.replicate, run.parallel.shard, run.parallel.context)
    rows = run.rows_per_rank(sizes.replicate * sizes.shard)
    half = run.precision != "float32"
    share = Share(
        sizes.shard * sizes.context, rows // run.accumulation, run.sequence_length // sizes.context,
        sizes.context, half,
    )  # fmt: skip
    parts = counts_of(run.model).flops(run.sequence_length)
    return Plan(
        run, gpu, sizes, share, step_memory(run, share), parts, _recomputed(run, parts),
        traffic(
            run.model, group_sizes(run.model, bfloat16=half), sizes, gpu, parts=run.accumulation, rows=rows,
            itemsize=share.itemsize, forwards=1 if run.activation_checkpointing == "none" else 2,
        ),
        assumptions,
    )  # fmt: skip


def _recomputed(run: Run, parts: dict[str, Flops]) -> float:
    """Of all blocks with ``full``; with ``selective`` all but the linear layers."""
    kept = {"none": set(parts), "selective": {"linear", "head"}, "full": {"head"}}[run.activation_checkpointing]
    flops = sum(part.forward for name, part in parts.items() if name not in kept)
    if run.activation_checkpointing == "full":
        # A block's last product is not needed for any gradient inside it, and PyTorch stops before it.
        flops -= 2.0 * run.model.num_layers * run.model.model_dim * run.model.ffn_dim
    return flops
