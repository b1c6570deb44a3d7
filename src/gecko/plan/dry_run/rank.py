"""One rank's step of a run on a fake device. The model, its sharding, the exchanges and the optimizer are real code."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gecko.data import IGNORED, Batch
from gecko.models import LanguageModel, meta_model
from gecko.parallel.context import ContextGroup
from gecko.parallel.fsdp import empty_sharded_model, whole
from gecko.parallel.mesh import MeshSizes, Ranks
from gecko.plan.dry_run import device
from gecko.plan.dry_run.device import DEVICE, FakeGPU, MemoryLedger, Peak
from gecko.plan.dry_run.trace import Trace
from gecko.runtime.private import backward_pass, fake_store, forget_meshes
from gecko.train import Run
from gecko.train.model import configured
from gecko.train.optimizer import build_optimizer
from gecko.train.step import CarriedState, SpikeRule, carried_state, split_batch, start_step

T = TypeVar("T")

MEAN_DOCUMENT = 1024
"""Tokens of a document, on average."""
FORWARD, LOSS_MOMENT, UPDATE = "the forward pass", "the loss", "the optimizer"


def backward_of(block: int) -> str:
    """Return the name of the moment in which a block is differentiated."""
    return f"the backward pass of block {block}"


@dataclass(frozen=True)
class RankStep:
    """What a rank's step showed."""

    memory: MemoryLedger
    trace: Trace

    @property
    def peak(self) -> Peak:
        return self.memory.peak()


def dry_step(run: Run, sizes: MeshSizes, rank: int) -> RankStep:
    """Run one step of ``run`` as ``rank`` of a mesh of ``sizes``, on a fake device and without communication.

    Blocks are not compiled, and float8 is taken for bfloat16. Rows hold random documents, other ones for each data
    rank.
    """
    run = replace(run, compile=False, precision="float32" if run.precision == "float32" else "bfloat16")
    ledger, trace = MemoryLedger(), Trace()
    batch = random_batch(run, sizes, rank)
    with connected(sizes, rank, trace) as ranks, FakeGPU(ledger, trace).running(), ledger.recording():
        _step(run, ranks, batch, ledger, trace)
    return RankStep(ledger, trace)


def random_batch(run: Run, sizes: MeshSizes, rank: int) -> Batch:
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
        self.trace.add("broadcast_object", range(self.world))
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
    _prepare(model, optimizer)
    _watch_parts(model, optimizer, ledger)
    rule = SpikeRule(run.skip, device=DEVICE)
    _mark_carried(carried, ledger)
    ledger.use, ledger.moment = device.WORK, FORWARD
    ledger.restart()
    trace.restart()
    start_step(
        model, optimizer, split_batch(batch, run.gradient_accumulation_steps, DEVICE, ranks),
        learning_rate=run.optimizer.learning_rate, clip=run.optimizer.clip, precision=run.precision, rule=rule,
        ranks=ranks, carried=carried,
    )  # fmt: skip
    ledger.mark(_local(parameter.grad for parameter in model.parameters()), device.GRADIENTS)
    if carried is not None:
        carried.advance()
        _mark_carried(carried, ledger)


def _mark_carried(carried: CarriedState | None, ledger: MemoryLedger) -> None:
    if carried is not None:
        ledger.mark((x for state in carried.before for x in state.tensors().values()), device.CARRIED)


def _prepare(model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    """Clip and update without gradients: at its first call, DTensor finds shapes by operations on whole parameters."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    norm = whole(nn.utils.get_total_norm([x.grad for x in model.parameters() if x.grad is not None]))
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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
