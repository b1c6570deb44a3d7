"""Dry run: one step of a run's real training code for one rank, on a GPU that computes nothing (``gecko.plan.device``).

The memory of a step of many blocks and rows follows from dry runs of a few. All blocks are alike. A model of one more
block changes the bytes in use at each moment of a step by the same number: in the forward pass, in the loss, in the
backward pass of the first and the last blocks, and in the update. The bytes in the backward pass of the blocks between
these lie on a line, so the most are at one of its ends. ``tests/plan/test_dry_run.py`` compares with whole models: the
bytes are equal. Rows differ by their documents alone, so one more row changes the bytes by nearly the same number.

``verify`` runs whole models: it checks whether the ranks' collectives fit together, and the memory of each.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import gecko.plan.device as device
from gecko.config import GeckoConfig
from gecko.data import IGNORED, Batch
from gecko.models import LanguageModel, ModelConfig, build_model, meta_model
from gecko.ops.backends.dispatch import triton_kernels_installed
from gecko.parallel.context import ContextGroup
from gecko.parallel.mesh import MeshSizes, Ranks
from gecko.parallel.sharding import empty_sharded_model, whole
from gecko.plan.device import DEVICE, Agreement, Call, FakeGPU, MemoryLedger, Peak, Trace, check_traces
from gecko.runtime.private import backward_pass, fake_store, forget_meshes
from gecko.runtime.tensors import memory_gib
from gecko.train import Run, ScheduleSettings
from gecko.train.capture import CapturedGradients
from gecko.train.model import compile_block, configured
from gecko.train.optimizer import build_optimizer
from gecko.train.step import CarriedState, SpikeRule, Step, carried_state, split_batch

T = TypeVar("T")

MEAN_DOCUMENT = 1024
"""Tokens of a document, on average."""
FORWARD, LOSS_MOMENT, UPDATE = "the forward pass", "the loss", "the optimizer"


def backward_of(block: int) -> str:
    """Return the name of the moment in which a block is differentiated."""
    return f"the backward pass of block {block}"


def dry_step(run: Run, sizes: MeshSizes, rank: int) -> tuple[MemoryLedger, Trace]:
    """Run one step of ``run`` as ``rank`` of a mesh of ``sizes``, on a fake device and without communication.

    Return what it did with memory, and its collectives. Blocks are not compiled, and float8 is taken for bfloat16. Rows
    hold random documents, other ones for each data rank.
    """
    run = replace(run, compile=False, precision="float32" if run.precision == "float32" else "bfloat16")
    ledger, trace, batch = MemoryLedger(), Trace(), _random_batch(run, sizes, rank)
    with connected(sizes, rank, trace) as ranks, FakeGPU(ledger.see, trace.see).running(), ledger.recording():
        _step(run, ranks, batch, ledger, trace)
    return ledger, trace


def _random_batch(run: Run, sizes: MeshSizes, rank: int) -> Batch:
    """Return the rows of a rank, whole: random tokens, and documents that start at random places."""
    shape = run.rows_per_rank(sizes.data_ranks), run.sequence_length
    generator = torch.Generator().manual_seed(rank // sizes.context)
    tokens = torch.randint(run.model.vocab_size, shape, generator=generator, device="cpu")
    starts = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < 1 / MEAN_DOCUMENT
    ids = starts.long().cumsum(1)
    ends = torch.cat([ids[:, 1:] != ids[:, :-1], torch.ones(shape[0], 1, dtype=torch.bool, device="cpu")], dim=1)
    return Batch(tokens, tokens.roll(-1, 1).masked_fill(ends, IGNORED), ids)


@dataclass(frozen=True)
class _DryRanks(Ranks):
    """A rank of a job whose other ranks do the same."""

    trace: Trace = field(default_factory=Trace)

    @cached_property
    def sharding_mesh(self) -> DeviceMesh:
        return super().sharding_mesh

    def broadcast(self, value: T) -> T:
        self.trace.calls.append(Call("broadcast_object", tuple(range(self.world)), ()))
        return value


@contextmanager
def connected(sizes: MeshSizes, rank: int, trace: Trace) -> Iterator[Ranks]:
    """Context in which this process is ``rank``; its process groups do not communicate."""
    world = sizes.data_ranks * sizes.context
    if world == 1:
        yield Ranks()
        return
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        shape, names = (sizes.replicate, sizes.shard, sizes.context), ("replicate", "shard", "context")
        mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)
        context = ContextGroup(mesh["context"].get_group()) if sizes.context > 1 else None
        ranks = _DryRanks(rank, sizes, mesh, context, trace=trace)
        with warnings.catch_warnings(action="ignore"):  # the groups have no time limits
            assert ranks.sharding_mesh is not None  # made here, on the host
        yield ranks
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _step(run: Run, ranks: Ranks, batch: Batch, ledger: MemoryLedger, trace: Trace) -> None:
    model = configured(meta_model(run.model), run)
    if ranks.world > 1:
        model = empty_sharded_model(model, ranks.sharding_mesh, DEVICE, bfloat16=run.precision == "bfloat16")
    else:
        model = model.to_empty(device=DEVICE)
        model.tie()
    ledger.mark(_local(model.parameters()), device.PARAMETERS)
    optimizer = build_optimizer(model, run.optimizer)
    ledger.mark(_local(x for state in optimizer.state.values() for x in state.values()), device.OPTIMIZER)
    carried = carried_state(run, model, ranks)
    # Clip and update without gradients, of which nothing is in use afterwards: at its first call, DTensor finds shapes
    # by operations on whole parameters.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    norm = whole(nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None]))
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    captured = CapturedGradients(model, run.precision, ranks) if run.capture else None
    computing = model if captured is None else captured.model
    ledger.mark(_local(computing.parameters()), device.PARAMETERS)
    _watch_parts(computing, optimizer, ledger)
    rule = SpikeRule(run.skip, device=DEVICE)
    step = Step(model, optimizer, run.optimizer.clip, run.precision, rule, ranks, carried, captured)
    _mark_carried(carried, ledger)
    ledger.use, ledger.moment = device.WORK, FORWARD
    ledger.restart()
    trace.calls.clear()
    step.start(split_batch(batch, run.gradient_accumulation_steps, DEVICE, ranks), run.optimizer.learning_rate)
    ledger.mark(_local(x.grad for each in (model, computing) for x in each.parameters()), device.GRADIENTS)
    if carried is not None:
        carried.advance()
        _mark_carried(carried, ledger)


def _mark_carried(carried: CarriedState | None, ledger: MemoryLedger) -> None:
    if carried is not None:
        ledger.mark((x for state in carried.before for x in state.tensors().values()), device.CARRIED)


@torch.no_grad()
def _local(tensors: Iterable[Any]) -> list[Any]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def _watch_parts(model: LanguageModel, optimizer: torch.optim.Optimizer, ledger: MemoryLedger) -> None:
    """Tell the ledger which part of the step runs."""
    last = len(model.blocks) - 1

    def enter(moment: str, use: str) -> None:
        ledger.moment, ledger.use = moment, use

    def start(*_: Any) -> None:
        if backward_pass() < 0:  # else the block is computed again
            enter(FORWARD, device.WORK)

    def differentiate(number: int, _: Any) -> None:
        if number == last:
            ledger.relabel(device.WORK, device.KEPT)
        enter(backward_of(number), device.WORK)

    def end(number: int, _: Any, __: Any, output: Any) -> None:
        if backward_pass() < 0:
            x = output[0] if isinstance(output, tuple) else output
            x.register_hook(partial(differentiate, number))
            if number == last:
                enter(LOSS_MOMENT, device.LOSS)

    model.blocks[0].register_forward_pre_hook(start)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(partial(end, number))
    optimizer.register_step_pre_hook(lambda *_: enter(UPDATE, device.OTHER))


DEPTHS = SHALLOW, DEEP = 3, 4
"""The fewest blocks of which two at each end, which may be the same, are unlike those between."""
ROWS = FEW, MORE = 2, 4
PARTS = 2
"""Accumulated parts that are run of more."""


def step_peak(run: Run, sizes: MeshSizes, rank: int) -> Peak:
    """Return the peak of ``dry_step(run, sizes, rank)`` from steps of at most four blocks and rows."""
    run = replace(run, schedule=ScheduleSettings())  # batches of its final size
    if (parts := run.gradient_accumulation_steps) > PARTS and not run.data.carry_state:
        # What the second part finds, every later one does.
        run = replace(run, batch_size=run.batch_size // parts * PARTS, gradient_accumulation_steps=PARTS)
    return max(_peaks(run, sizes, rank).values(), key=lambda peak: peak.total)


def _peaks(run: Run, sizes: MeshSizes, rank: int) -> dict[str, Peak]:
    """Return the memory at its peak in each moment of a rank's step (forward pass, loss, backward pass of each block,
    optimizer). Many rows and many blocks are extended from few."""
    parts = sizes.data_ranks * run.gradient_accumulation_steps
    if (rows := run.batch_size // parts) > MORE:
        few, more = (_peaks(replace(run, batch_size=parts * number), sizes, rank) for number in ROWS)
        return {moment: _on_line(few[moment], more[moment], (rows - MORE) / (MORE - FEW), moment) for moment in more}
    if (layers := run.model.num_layers) > DEEP:
        shallow, deep = (_peaks(replace(run, model=replace(run.model, num_layers=n)), sizes, rank) for n in DEPTHS)
        ends = (0, 1, layers - 2, layers - 1)
        names = {name: (name, name) for name in (FORWARD, LOSS_MOMENT, UPDATE)} | {
            backward_of(block): tuple(backward_of(block if block < 2 else block - layers + depth) for depth in DEPTHS)
            for block in ends
        }
        return {
            whole: _on_line(shallow[before], deep[after], layers - DEEP, whole)
            for whole, (before, after) in names.items()
        }
    memory, _ = dry_step(run, sizes, rank)
    moments = FORWARD, LOSS_MOMENT, UPDATE, *map(backward_of, range(layers))
    return {moment: memory.peak(moment) for moment in moments}


def _on_line(before: Peak, after: Peak, steps: float, moment: str) -> Peak:
    """Return the peak that lies ``steps`` times further than ``after`` on the line from ``before`` to it."""

    def line(first: int, second: int) -> int:
        return second + round(steps * (second - first))

    uses = {use: line(before.uses.get(use, 0), after.uses.get(use, 0)) for use in {**before.uses, **after.uses}}
    return Peak(line(before.total, after.total), uses, moment)


class BlockMemory(NamedTuple):
    """Bytes of one block, besides its weights: those that it keeps for backward, and the most while it reads."""

    kept: int
    work: int


@lru_cache(maxsize=4)
def block_memory(config: ModelConfig, dtype: torch.dtype, tokens: int) -> BlockMemory:
    """Measure a block of that dtype that reads a row of ``tokens`` tokens.

    Operators are those of a GPU where Triton is installed, and PyTorch's elsewhere.
    """

    def read(depth: int, *, training: bool) -> BlockMemory:
        ledger = MemoryLedger()
        with FakeGPU(ledger.see).running(), torch.set_grad_enabled(training):
            model = meta_model(replace(config, num_layers=depth)).to(dtype).to_empty(device=DEVICE)
            model.sharded = True  # else states name the model by the numbers of its weights
            weights = ledger.in_use
            ledger.restart()
            hidden = model.hidden(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
            kept = ledger.in_use - weights
            del hidden
            return BlockMemory(kept, ledger.peak().total - weights)

    one, two = (read(depth, training=True) for depth in (1, 2))
    return BlockMemory(two.kept - one.kept, read(1, training=False).work)


TOLERANCE = 0.01
"""Accepted difference of the plan's memory from that of the rank that needs most, whose rows hold other documents."""


class Verification(NamedTuple):
    """Results of the dry runs of a plan for some ranks; the peak is that of the rank that needs most memory."""

    planned: int
    """Bytes of the plan without the reserve, which a dry run does not see."""
    ranks: tuple[int, ...]
    peak: Peak
    agreement: Agreement
    graphs: dict[int, int]
    """Number of compiled graphs by depth; empty if the run does not compile."""
    seconds: float
    host_bytes: int
    """Most memory that the process had."""

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


def verify(run: Run, sizes: MeshSizes, memory: Mapping[str, int]) -> Verification:
    """Run one step of ``run`` for the ``representatives`` of its mesh, and compare with the planned ``memory`` by kind.

    Raise ValueError if the ranks' collectives or messages do not fit together, and ImportError without Triton: then
    operators choose what they do not choose on a GPU.
    """
    if not triton_kernels_installed():
        raise ImportError("a dry run takes the operators of a GPU, which need Triton: pip install 'gecko-lm[kernels]'")
    begin = time.perf_counter()
    steps = {rank: dry_step(run, sizes, rank) for rank in representatives(sizes)}
    agreement = check_traces({rank: trace for rank, (_, trace) in steps.items()})
    peak = max((ledger.peak() for ledger, _ in steps.values()), key=lambda peak: peak.total)
    depths = {min(2, run.model.num_layers), run.model.num_layers} if run.compile else set()
    graphs = {depth: graph_count(run, depth) for depth in sorted(depths)}
    host = round(memory_gib(torch.device("cpu")) * 2**30)
    planned = sum(size for part, size in memory.items() if part != "reserve")
    return Verification(planned, tuple(steps), peak, agreement, graphs, time.perf_counter() - begin, host)


def graph_count(run: Run, depth: int) -> int:
    """Return the number of graphs of two calls, with other documents, of a narrow model of the run's architecture.

    The model is real and on the CPU, whole rows on one rank: the graphs hold PyTorch's operations in place of kernels.
    PyTorch traces and cuts them as in training, but generates no code.
    """
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = run.model
    narrow: dict[str, Any] = {"vocab_size": 64, "model_dim": 64, "num_heads": 2, "ffn_dim": 64, "num_layers": depth}
    if isinstance(config, GeckoConfig):
        narrow |= {
            "key_dim": 32, "value_dim": 64, "chunk_size": 16, "rope_frequencies": None, "timestep_groups": 4,
            "cema_modes": 4, "sinks": min(config.sinks, 16), "norm_groups": min(config.norm_groups, 4),
            "rope_heads": None if config.rope_heads is None else min(config.rope_heads, 2),
        }  # fmt: skip
    shared = None if config.key_value_heads is None or not isinstance(config, GeckoConfig) else 1
    model = build_model(replace(config, **narrow, key_value_heads=shared))
    model.activation_checkpointing = run.activation_checkpointing
    for block in model.blocks:
        compile_block(block, backend=keep)
    try:
        for lengths in ((48, 16), (30, 34)):
            ids = torch.repeat_interleave(torch.tensor(lengths, device="cpu")).unsqueeze(0)
            tokens = torch.zeros_like(ids)
            model.loss(tokens, tokens, ids).backward()
    finally:
        torch.compiler.reset()
    return len(graphs)
