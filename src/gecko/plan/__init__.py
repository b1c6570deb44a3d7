"""Estimates of a training run's memory, FLOPs, communication and time, made without starting it.

``find_plan`` looks for settings with which a run fits its GPUs: the mesh, activation checkpointing and accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, get_args

from gecko.models.gecko import ActivationCheckpointing
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.parallel.mesh import MeshSizes
from gecko.plan.counts import FLOAT, HALF, counts_of, group_sizes, state_memory, step_memory
from gecko.plan.device import GRADIENTS, KEPT, LOSS, OPTIMIZER, PARAMETERS, WORK
from gecko.records import unknown_name
from gecko.train.run import Run
from gecko.train.throughput import PEAK_FLOPS, flops_per_token

__all__ = ["GPU", "GPUS", "Assumptions", "Plan", "find_gpu", "find_plan", "make_plan"]

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class GPU:
    """Memory and speed of a GPU, from the vendor's data sheet."""

    name: str
    memory: int
    peak: float
    """Peak dense FLOP/s in bfloat16."""
    node_link: float
    """Bytes/s that one GPU sends to another of its node."""
    network: float
    """Bytes/s that one GPU sends to another node."""


GPUS = {
    "a100": GPU("A100 80 GB", 80 * 10**9, PEAK_FLOPS["A100"], 300e9, 25e9),
    "h100": GPU("H100 80 GB", 80 * 10**9, PEAK_FLOPS["H100"], 450e9, 50e9),
    "h200": GPU("H200 141 GB", 141 * 10**9, PEAK_FLOPS["H200"], 450e9, 50e9),
    "b200": GPU("B200 180 GB", 180 * 10**9, PEAK_FLOPS["B200"], 900e9, 50e9),
}
"""Links: NVLink in one direction, and one network card of 200 Gb/s (A100) or 400 Gb/s per GPU."""


def find_gpu(name: str) -> GPU:
    """Return the GPU of that name. Raise ValueError if it is unknown."""
    if name.lower() not in GPUS:
        raise ValueError(unknown_name("--gpu", name, GPUS))
    return GPUS[name.lower()]


class Traffic(NamedTuple):
    """One kind of communication in a step: bytes that each GPU sends, and bytes/s."""

    size: float
    bandwidth: float


@dataclass(frozen=True)
class Assumptions:
    """Numbers that cannot be computed. Run a hundred steps, and set the values measured there."""

    efficiency: float = 0.5
    """Fraction of peak FLOP/s that all kernels together reach."""
    overlap: float = 0.8
    """Fraction of compute time that can hide communication."""


class Plan:
    """Estimate of a run: sizes in bytes and times in seconds, for one GPU and one step unless stated otherwise.

    Memory is measured when it is first asked for, by a dry run, which takes seconds. Raise ValueError if the batch and
    its rows cannot be divided among the GPUs.
    """

    def __init__(self, run: Run, gpu: GPU, sizes: MeshSizes, assumptions: Assumptions) -> None:
        self.run, self.gpu, self.sizes, self.assumptions = run, gpu, sizes, assumptions
        self.mode, parts, counts = run.activation_checkpointing, run.gradient_accumulation_steps, counts_of(run.model)
        self.divided = sizes.shard * sizes.context
        """GPUs among which parameters, gradients and optimizer state are divided."""
        self.gpus = sizes.replicate * self.divided
        rank_rows = run.rows_per_rank(sizes.data_ranks)
        self.rows = rank_rows // parts
        """Rows of a GPU's forward pass."""
        self.tokens = run.tokens_per_step / self.gpus
        """Tokens per GPU and step."""
        self.tokens_at_once = self.tokens / parts
        self.itemsize = FLOAT if run.precision == "float32" else HALF
        """Bytes per number of matrix products."""
        self.flops = counts.flops(run.sequence_length)
        """FLOPs per token, by part."""
        kept = {"none": set(self.flops), "selective": {"linear", "head"}, "full": {"head"}}[self.mode]
        self.recomputed = sum(part.forward for name, part in self.flops.items() if name not in kept)
        """FLOPs per token of the second forward pass."""
        if self.mode == "full":
            # A block's last product is not needed for any gradient inside it, and PyTorch stops before it.
            self.recomputed -= 2.0 * run.model.num_layers * run.model.model_dim * run.model.ffn_dim
        sent, copies = (self.divided - 1) / self.divided, (sizes.replicate - 1) / sizes.replicate
        groups = group_sizes(run.model, bfloat16=self.itemsize == HALF)
        # Captured steps gather all weights, in float32 as gradients, and reduce these once, while they do nothing else.
        gathered, reduced = parts * (2 * groups.blocks + groups.rest), parts * groups.gradients
        if run.capture:
            gathered = reduced = groups.gradients
        exchanged = counts.context_bytes(self.itemsize, sizes.context) if sizes.context > 1 else 0
        self.traffic = {
            "gather weights": self._ring(sent * gathered, self.divided),
            "reduce gradients": self._ring(sent * reduced, self.divided),
            "sum over replicas": self._ring(2 * copies * groups.gradients / self.divided, self.gpus),
            "context exchange": self._ring(2 * rank_rows * run.model.num_layers * exchanged, sizes.context),
        }
        """Communication in a step, by kind. In a ring, each of n ranks sends (n − 1) / n of the whole."""
        flops = sum(part.total for part in self.flops.values()) + self.recomputed
        self.computing = self.tokens * flops / (gpu.peak * assumptions.efficiency)
        self.communicating = sum(kind.size / kind.bandwidth for kind in self.traffic.values())
        self.overlap = 0.0 if run.capture else assumptions.overlap
        """Fraction of compute time that can hide communication."""
        self.step_seconds = self.computing + max(0.0, self.communicating - self.overlap * self.computing)
        whole = None if run.steps is None else run.tokens_before(run.steps) / run.tokens_per_step
        self.days = None if whole is None else whole * self.step_seconds / 86_400
        """Days for the tokens of all steps; None if the run has no number of steps."""
        self.gpu_hours = None if self.days is None else self.days * 24 * self.gpus

    def _ring(self, size: float, ranks: int) -> Traffic:
        """Return the communication in a ring of ``ranks`` GPUs, which is as fast as its slowest link."""
        return Traffic(size, self.gpu.node_link if ranks <= GPUS_PER_NODE else self.gpu.network)

    @property
    def measured(self) -> bool:
        """Whether ``memory`` is that of a whole step. Without Triton it is that of the weights and their optimizer."""
        return triton_kernels_installed()

    @cached_property
    def peak(self) -> tuple[dict[str, int], str]:
        """Bytes at the peak by kind, and the part of the step in which it is."""
        if self.measured:
            return step_memory(self.run, self.sizes)
        muon = self.run.optimizer.name == "muon"
        return state_memory(self.run.model, self.divided, muon=muon), "the optimizer"

    @property
    def memory(self) -> dict[str, int]:
        return self.peak[0]

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the GPU has this memory; None if what is known fits, but not all is."""
        fits = self.total <= self.gpu.memory
        return fits if self.measured or not fits else None

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilization (MFU), as training reports it."""
        needed = flops_per_token(self.run.model, self.run.sequence_length)
        return self.tokens * needed / (self.step_seconds * self.gpu.peak)

    @property
    def command(self) -> str:
        """Command that trains the run on these GPUs."""
        each = max(n for n in range(1, GPUS_PER_NODE + 1) if self.gpus % n == 0)
        nodes = "" if self.gpus == each else f"--nnodes {self.gpus // each} "
        meeting = "--rdzv-backend c10d --rdzv-endpoint HEAD:29500 " if nodes else ""
        launch = f"torchrun {nodes}--nproc-per-node {each} {meeting}-m " if self.gpus > 1 else ""
        return launch + self.run.command()


def make_plan(run: Run, gpus: int, gpu: GPU, assumptions: Assumptions) -> Plan:
    """Estimate ``run`` on ``gpus`` GPUs. Raise ValueError if the product of ``run.parallel`` is not ``gpus``, or the
    batch cannot be divided among them, or ``run`` trains adapters."""
    if run.lora_rank is not None:
        raise ValueError(
            f"gecko plan estimates runs that train all weights; got lora_rank={run.lora_rank}. With lora_rank=none the "
            "plan is of a run that needs more memory."
        )
    for name, value in vars(assumptions).items():
        if not 0 < value <= 1:
            raise ValueError(f"--{name} is a fraction and must lie between 0 and 1; got {value}.")
    mesh, remedy = run.parallel, "--gpus: with parallel.replicate=1 parallel.shard=none a multiple of context"
    return Plan(run, gpu, MeshSizes.of(gpus, mesh.replicate, mesh.shard, mesh.context, remedy), assumptions)


MODES = get_args(ActivationCheckpointing)
"""Ways of checkpointing, from the most memory to the least."""


def find_plan(
    run: Run, gpus: int, gpu: GPU, assumptions: Assumptions, kept: Collection[str], measure: Callable[[Plan], object]
) -> Plan:
    """Return the plan of ``run`` if it fits, else the fastest one with other settings that fits.

    A dry run takes seconds, so few are made: for each way of checkpointing, the settings that need the least memory,
    and then those that should fit by what these need. Without Triton, or if none fits, the settings that need the least
    are returned. Settings named in ``kept`` stay as they are; ``measure`` is called with each plan before its memory is
    used. Raise ValueError if the batch and its rows cannot be divided among the GPUs.
    """
    try:
        own = make_plan(run, gpus, gpu, assumptions)
    except ValueError:
        own = None
    if own is not None:
        measure(own)
        if own.fits is not False:
            return own
    plans = list(_plans(run, gpus, gpu, assumptions, kept))
    if not plans:
        return make_plan(run, gpus, gpu, assumptions)
    lightest = {plan.mode: plan for plan in sorted(plans, key=_need, reverse=True)}
    if not plans[0].measured:
        return min(plans, key=_need)
    near: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.step_seconds, plan.communicating)):
        if plan.mode not in near:
            measure(lightest[plan.mode])
            near[plan.mode] = lightest[plan.mode]
        if _at_least(plan, near[plan.mode]) <= gpu.memory:
            measure(plan)
            if plan.fits:
                return plan
            near[plan.mode] = plan
    return min(lightest.values(), key=lambda plan: plan.total)


def _plans(run: Run, gpus: int, gpu: GPU, assumptions: Assumptions, kept: Collection[str]) -> Iterator[Plan]:
    """Yield the plans of all settings that ``run`` can be trained with."""
    ranks, parts = ([n for n in range(1, number + 1) if number % n == 0] for number in (gpus, run.batch_size))
    for replicate, context, mode, accumulated in product(ranks, ranks, MODES, parts):
        mesh, shard = run.parallel, gpus // (replicate * context)
        settings = {
            "parallel.replicate": (mesh.replicate, replicate), "parallel.shard": (mesh.shard or shard, shard),
            "parallel.context": (mesh.context, context),
            "activation_checkpointing": (run.activation_checkpointing, mode),
            "gradient_accumulation_steps": (run.gradient_accumulation_steps, accumulated),
        }  # fmt: skip
        changes = {name: new for name, (old, new) in settings.items() if new != old}
        if replicate * shard * context == gpus and not changes.keys() & kept:
            try:
                changed = run.with_settings(*(f"{name}={new}" for name, new in changes.items()))
                yield make_plan(changed, gpus, gpu, assumptions)
            except ValueError:  # the run cannot be divided so
                continue


def _need(plan: Plan) -> tuple[float, ...]:
    """Return what orders plans by their need of memory, without measuring it."""
    return -MODES.index(plan.mode), plan.tokens_at_once, -plan.divided


def _at_least(plan: Plan, known: Plan) -> float:
    """Return about the fewest bytes of ``plan``, from the memory of one with the same checkpointing."""
    shares, tokens = known.divided / plan.divided, plan.tokens_at_once / known.tokens_at_once
    accumulates = plan.run.gradient_accumulation_steps > 1 or known.run.gradient_accumulation_steps == 1
    growth = {PARAMETERS: shares, OPTIMIZER: shares, GRADIENTS: shares * accumulates, KEPT: tokens}
    growth |= dict.fromkeys((WORK, LOSS), min(1.0, tokens))
    return sum(size * growth.get(part, 1.0) for part, size in known.memory.items())
