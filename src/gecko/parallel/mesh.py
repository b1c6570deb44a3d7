"""Ranks of a job: their device mesh, collectives on small values, and rendezvous.

torchrun keeps one key-value store for all restarts of a job, and PyTorch uses the same keys each time. So that a fast
rank does not read the address of a killed predecessor of another one, the ranks first agree on an unused prefix.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from gecko.parallel.context import ContextGroup


def fresh_rendezvous(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Return an unused prefix of ``store``, the same for all ranks of this start of the job.

    Each rank writes a random word. The first rank publishes the words of all until each rank has found its own word
    among them and answered with the first rank's word; only processes that run at the same time can do that.
    Raise RuntimeError at ``timeout``.
    """
    word, others = uuid.uuid4().hex, range(1, world)
    deadline = time.monotonic() + timeout.total_seconds()

    def written(*keys: str) -> list[str]:
        # If one is missing, ``get`` would wait for it and fail.
        return [store.get(key).decode() for key in keys] if store.check(list(keys)) else []

    def agreed() -> str | None:
        if rank == 0:
            words = written(*(f"gecko/word/{other}" for other in others))
            if words:
                store.set("gecko/read-out", " ".join([word, *words]))
            return word if words and set(written(*(f"gecko/answer/{other}" for other in others))) == {word} else None
        heard = "".join(written("gecko/read-out")).split()
        if rank >= len(heard) or heard[rank] != word:
            return None
        store.set(f"gecko/answer/{rank}", heard[0])
        return heard[0]

    if rank:
        store.set(f"gecko/word/{rank}", word)
    while (meeting := agreed()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("all ranks of the job must start within the time limit; some did not. See their logs.")
        time.sleep(0.02)
    return PrefixStore(f"gecko/{meeting}", store)


T = TypeVar("T")

FAILED = 2
"""Exit code of a rank if the first rank reports the error."""


@dataclass(frozen=True)
class MeshSizes:
    replicate: int = 1
    shard: int = 1
    context: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks among which the rows of a batch are divided."""
        return self.replicate * self.shard

    @classmethod
    def of(
        cls, world: int, replicate: int, shard: int | None, context: int,
        remedy: str = "torchrun's --nnodes and --nproc-per-node",
    ) -> MeshSizes:  # fmt: skip
        """Return the sizes for ``world`` ranks; ``shard=None`` uses all that remain. Raise ValueError, with ``remedy``,
        if the product of the sizes is not ``world``."""
        sizes = cls(replicate, shard or max(1, world // (replicate * context)), context)
        if sizes.data_ranks * context != world:
            asked = "what is left" if shard is None else shard
            raise ValueError(
                f"parallel.replicate × parallel.shard × parallel.context must be the number of ranks, {world}; got "
                f"{replicate} × {asked} × {context}. Change one of them, or {remedy}."
            )
        return sizes


@dataclass(frozen=True)
class Ranks:
    """This process among the ``world`` processes of a job. A single process needs no process group.

    Ranks are ordered as (replicate, shard, context), so ranks that share a row are neighbours.
    """

    rank: int = 0
    sizes: MeshSizes = MeshSizes()
    mesh: DeviceMesh | None = None
    """Device mesh with the dimensions replicate, shard and context; None for a single process."""
    context: ContextGroup | None = None
    """The ranks that share this rank's rows; None if it holds whole rows."""
    timeout: timedelta = default_pg_timeout
    """Timeout of collectives; pass it to every new process group."""
    control: dist.ProcessGroup | None = None
    """Group of all ranks for values on the host. None: the default group."""
    console: Console = field(default_factory=lambda: Console(quiet=True), compare=False)
    """Prints on the first rank of a session only."""

    @property
    def world(self) -> int:
        return self.sizes.data_ranks * self.sizes.context

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files and messages."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        return self.sizes.data_ranks

    @property
    def data_rank(self) -> int:
        return self.rank // self.sizes.context

    def columns(self, length: int) -> slice:
        """Return the columns that this rank holds of a row of ``length`` tokens."""
        part = length // self.sizes.context
        first = self.rank % self.sizes.context * part
        return slice(first, first + part)

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh for ``fully_shard``: shard and context form one dimension, after replicate if that is above 1."""
        assert self.mesh is not None
        flat = _limited(self.mesh["shard", "context"]._flatten("shard_context"), self.timeout)
        if self.sizes.replicate == 1:
            return flat
        ids = self.mesh.mesh.reshape(self.sizes.replicate, -1)
        names = ("replicate", "shard_context")
        return _limited(DeviceMesh(self.mesh.device_type, ids, mesh_dim_names=names), self.timeout)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all ranks, bitwise identical on each."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.control)
        return values

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor on the ranks' devices, bitwise identical on each. The host does not wait."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def of_first_replica(self, value: Tensor) -> Tensor:
        """Return the value that the first replica has in a tensor on the ranks' devices. The host does not wait."""
        if self.mesh is not None and self.sizes.replicate > 1:
            value = value.clone()
            dist.broadcast(value, group=self.mesh.get_group("replicate"), group_src=0)
        return value

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: T) -> T:
        """Return the first rank's ``value``, on every rank."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def broadcast_into(self, values: Tensor, source: int) -> None:
        """Overwrite a CPU tensor with that of rank ``source``, which has the same size."""
        if self.world > 1 and values.numel():
            dist.broadcast(values, group=self.control, group_src=source)

    def run_or_abort_all(self, work: Callable[[], T]) -> T:
        """Return the result of ``work()`` on each rank.

        If it fails on one rank, all end: the first rank raises the error, the others raise SystemExit.
        """
        if self.world == 1:
            return work()
        error: Exception | None = None
        try:
            result = work()
        except (ValueError, OSError, RuntimeError, ImportError) as caught:
            error = caught
        messages = self.gather(None if error is None else f"{error}")
        if all(message is None for message in messages):
            return result
        if not self.is_main:
            raise SystemExit(FAILED) from error
        if error is not None:
            raise error
        rank, message = next((i, text) for i, text in enumerate(messages) if text is not None)
        raise RuntimeError(f"on rank {rank}: {message}")

    def main(self, work: Callable[[], T]) -> T:
        """Return, on every rank, the result of ``work()`` on the first rank. If it fails, so do all ranks."""
        result: Any = self.run_or_abort_all(lambda: work() if self.is_main else None)
        return self.broadcast(result)


ALONE = Ranks()
"""A single process."""


class DelayedSum:
    """Sums of small CPU tensors over all ranks that arrive one call later, so that no rank waits for another."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._started: tuple[dist.Work, Tensor] | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Start the sum of ``values`` and return that of the previous call; zeros in the first call.

        All ranks call it together. A single rank gets ``values``.
        """
        if self._ranks.world == 1:
            return values
        before, sums = self._started, values.clone()
        work = dist.all_reduce(sums, group=self._ranks.control, async_op=True)
        assert work is not None
        self._started = work, sums
        if before is None:
            return torch.zeros_like(values)
        before[0].wait()
        return before[1]


def _limited(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Set the timeout of the groups of ``mesh``, which do not inherit it; NCCL's default is 10 minutes."""
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def launched() -> tuple[int, int, int]:
    """Return rank, number of ranks, and rank on this machine, as torchrun set them; (0, 1, 0) without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world, local = (int(os.environ.get(name, default)) for name, default in zip(names, "010", strict=True))
    return rank, world, local


@contextmanager
def only_first_rank_reports() -> Iterator[None]:
    """Context for checks that all ranks run before they connect: only the first rank raises the error itself."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if launched()[0] == 0:
            raise
        raise SystemExit(FAILED) from error


@contextmanager
def connected(sizes: MeshSizes, device: torch.device, timeout: timedelta | None) -> Iterator[Ranks]:
    """Context in which the ranks that torchrun started are connected: by gloo for CPU tensors, by NCCL for CUDA. A
    collective of any group fails if it takes longer than ``timeout`` (None: half an hour)."""
    rank, world, _ = launched()
    if world == 1:
        yield Ranks()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timeout or default_pg_timeout
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    store = fresh_rendezvous(store, rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        shape = (sizes.replicate, sizes.shard, sizes.context)
        mesh = _limited(init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "context")), timeout)
        context = ContextGroup(mesh["context"].get_group()) if sizes.context > 1 else None
        # With GPUs the default group carries CPU tensors by gloo. On CPUs it carries the tensors of the model.
        control = dist.new_group(backend="gloo", timeout=timeout) if device.type == "cpu" else None
        yield Ranks(rank, sizes, mesh, context, timeout, control)
    finally:
        # No barrier: after an error the other ranks may be gone, and waiting for them would hide the error.
        dist.destroy_process_group()
