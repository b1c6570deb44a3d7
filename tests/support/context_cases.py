"""Functions that the processes of a context group run; see ``test_context.py``."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import cases
from support.jobs import TIMEOUT
from support.native_agreement import calls
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from gecko import Gecko
from gecko.inference import read as read_text
from gecko.ops.backends import dispatch
from gecko.ops.loss import IGNORED
from gecko.parallel.context import ContextGroup
from gecko.parallel.context import prefill_on_ranks as prefill_on_several
from gecko.state import GeckoState

CHUNK = cases.CHUNK


@dataclass(frozen=True)
class Text:
    """A batch of rows and how they are divided: ``ranks`` parts of ``chunks`` chunks each."""

    ranks: int
    chunks: int
    documents: str = "none"
    read: int = 0
    """Tokens read in an earlier call."""
    batch: int = 2
    bfloat16_window: bool = False

    def __str__(self) -> str:
        return (
            f"{self.ranks}x{self.chunks}-{self.documents}"
            + (f"-after{self.read}" if self.read else "")
            + ("-bfloat16" if self.bfloat16_window else "")
        )

    @property
    def length(self) -> int:
        return self.ranks * self.chunks * CHUNK


def ids_of(text: Text) -> Tensor | None:
    """Return segment ids (B, read + length) with starts at random, at or next to rank borders, or a chunk before."""
    if text.documents == "none":
        return None
    length, part = text.read + text.length, text.chunks * CHUNK
    starts = torch.zeros(text.batch, length, dtype=torch.bool)
    borders = [text.read + rank * part for rank in range(1, text.ranks)]
    if text.documents == "borders":
        starts[0, borders] = True
    elif text.documents == "around":
        starts[0, [b - 1 for b in borders]] = True
        starts[1, [b + 1 for b in borders]] = True
    elif text.documents == "chunks":
        starts[0, [b - CHUNK for b in borders]] = True
        starts[1, borders[-1:]] = True
    else:
        rate = {"few": 0.03, "many": 0.3}[text.documents]
        starts = torch.rand(text.batch, length, generator=torch.Generator().manual_seed(length)) < rate
    return starts.long().cumsum(1)


def tokens_of(text: Text) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, read + length). Ignored targets are distributed unevenly over the ranks."""
    whole = cases.tokens(text.batch, text.read + text.length + 1, seed=text.ranks)
    targets = whole[:, 1:].clone()
    targets[:, : 5 + text.read] = IGNORED
    return whole[:, :-1], targets


def weights_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)


def state_terms(state: GeckoState) -> Tensor:
    """Return a random weighted sum of all numbers of a state."""
    parts = [x for x in state.tensors().values() if x.is_floating_point()]
    return sum((torch.where(x.abs() < 1e20, x, 0) * weights_like(x)).sum() for x in parts)


def arrays(named: dict[str, Tensor]) -> dict[str, np.ndarray]:
    wide = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in named.items()}
    return {name: x.detach().numpy() for name, x in wide.items()}


@cache
def last_two(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the group once, in every process."""
    return dist.new_group([2, 3], timeout=TIMEOUT)


def group_of(ranks: int) -> ContextGroup | None:
    """Return the context group of the last ``ranks`` processes, whose numbers in it differ from those in the job; None
    in the others."""
    if dist.get_world_size() == ranks:
        return ContextGroup(dist.group.WORLD)
    pair = last_two(dist.group.WORLD)
    return ContextGroup(pair) if dist.get_rank() >= 2 else None


def read(
    variant: str, text: Text, checkpointing: str, group: ContextGroup | None, model: Gecko | None = None
) -> dict[str, Any]:
    """Return outputs, loss, token losses, final state, and the gradients of loss plus outputs plus final state.

    With a group, the outputs are those of this rank, and the gradients are summed over the ranks.
    """
    model = cases.model(variant, bfloat16_window=text.bfloat16_window) if model is None else model
    model.activation_checkpointing = checkpointing
    tokens, targets = tokens_of(text)
    ids = ids_of(text)
    state = None
    if text.read:
        with torch.no_grad():
            _, state = model(tokens[:, : text.read], None if ids is None else ids[:, : text.read])
    tokens, targets, ids = (None if x is None else x[:, text.read :] for x in (tokens, targets, ids))
    columns, last = slice(None), True
    if group is not None:
        columns, last = group.slice(text.length, CHUNK), group.rank == group.size - 1
    weights = weights_like(torch.empty(*tokens.shape, model.config.model_dim))[:, columns]
    tokens, targets, ids = (None if x is None else x[:, columns] for x in (tokens, targets, ids))
    loss = model.loss(tokens, targets, ids, context=group)
    hidden, after = model.hidden(tokens, ids, state, context=group)
    (loss + (hidden * weights).sum() + (state_terms(after) if last else 0 * state_terms(after))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group.line.group)
    losses, _ = model.token_losses(tokens, targets, ids, state, context=group)
    with torch.inference_mode():
        logits, inferred = model(tokens, ids, state, context=group)
    return {
        "loss": loss.item(), "hidden": hidden.detach().numpy(), "losses": losses.numpy(), "logits": logits.numpy(),
        "gradients": arrays(gradients), "state": arrays(after.tensors()), "inferred": arrays(inferred.tensors()),
    }  # fmt: skip


def prefill_on_ranks(variant: str, text: Text, checkpointing: str) -> dict[str, Any]:
    group = group_of(text.ranks)
    return {} if group is None else read(variant, text, checkpointing, group)


def model_for_kernels(variant: str, layers: int = 2) -> Gecko:
    """Return a model in float32, whose heads have sizes that all C kernels support."""
    return cases.model(variant, torch.float32, key_dim=32, value_dim=64, num_layers=layers)


def read_on_kernels(variant: str, text: Text, checkpointing: str, backend: str, layers: int = 2) -> dict[str, Any]:
    """Return ``read`` on ranks, in float32 by kernels of ``backend``, with the names of those that ran."""
    recorder = {"cpu": c_kernels_recorded, "triton": triton_kernels_recorded}[backend]
    group = group_of(text.ranks)
    if group is None:
        return {}
    with recorder() as ran:
        found = read(variant, text, checkpointing, group, model_for_kernels(variant, layers))
    return found | {"ran": sorted(set(ran))}


@contextmanager
def c_kernels_recorded() -> Iterator[list[str]]:
    """Yield a list of the names of the C kernels that run."""
    names = ("timestep_norm", "cema", "chunk_attention.cpu", "working_memory.cpu")
    with pytest.MonkeyPatch.context() as patch:
        yield calls(patch, *(importlib.import_module(f"gecko.ops.{name}") for name in names))


@contextmanager
def triton_kernels_recorded() -> Iterator[list[str]]:
    """Make operators use Triton kernels for CPU tensors; yield a list of the names of those that run."""
    ran: list[str] = []
    plain = dispatch.Launch.run

    def run(launch: dispatch.Launch) -> None:
        ran.append(launch.kernel.__name__)
        plain(launch)

    taken = mock.patch.object(dispatch, "triton_kernels_run_on", lambda x: x.dtype in dispatch.DTYPES)
    with taken, mock.patch.object(dispatch.Launch, "run", run):
        yield ran


EXACT = 1e-9
"""Largest difference of float64 results, relative to each number, and to the largest number of the tensor."""


def assert_one_device(parts: list[dict[str, Any]], whole: dict[str, Any], near: bool = False) -> None:
    """Assert that outputs, gradients and last state of ranks are those of one device in float64; with ``near``, those
    of ranks in float32."""
    for name in ("hidden", "losses", "logits"):
        assert_same(np.concatenate([part[name] for part in parts], axis=1), whole[name], name, near)
    for part in parts:
        assert part["loss"] == parts[0]["loss"]
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-4 if near else EXACT)
        for name, wanted in whole["gradients"].items():
            assert_same(part["gradients"][name], wanted, f"gradient {name}", near)
    for kind in ("state", "inferred"):
        for name, wanted in whole[kind].items():
            assert_same(parts[-1][kind][name], wanted, f"{kind} {name}", near)


def assert_same(got: np.ndarray, wanted: np.ndarray, name: str, near: bool = False) -> None:
    if wanted.dtype.kind != "f":
        assert np.array_equal(got, wanted), name
        return
    finite = np.abs(wanted) < 1e20  # the log of an empty sum is −1e30
    scale = np.abs(wanted[finite]).max(initial=1.0)
    rtol, atol = (0, 1e-4 * scale) if near else (EXACT, EXACT * scale)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol, atol, err_msg=name)
    np.testing.assert_allclose(got[~finite], wanted[~finite], 1e-7 if near else EXACT, err_msg=name)


def batches(variant: str, checkpointing: str) -> tuple[int, int]:
    """Return the number of batches that a rank posts in the forward and in the backward pass of a loss."""
    group, model, text = group_of(4), cases.model(variant), Text(4, 2)
    model.activation_checkpointing = checkpointing
    tokens, targets = tokens_of(text)
    columns = group.slice(text.length, CHUNK)
    with mock.patch.object(group.line, "post", wraps=group.line.post) as post:
        loss = model.loss(tokens[:, columns], targets[:, columns], context=group)
        forward = post.call_count
        loss.backward()
        return forward, post.call_count - forward


def read_shards(variant: str, chunks: int, checkpointing: str, documents: str) -> dict[str, Any]:
    """Return loss and whole gradients on a 2 × 2 mesh that shards rows, the tokens of a row, and parameters."""
    mesh, flat = meshes(dist.group.WORLD)
    group, text = ContextGroup(mesh["context"].get_group()), Text(2, chunks, documents, batch=4)
    model = cases.model(variant)
    model.activation_checkpointing = checkpointing
    for block in model.blocks:
        fully_shard(block, mesh=flat)
    fully_shard(model, mesh=flat)
    register_fsdp_forward_method(model, "loss")
    tokens, targets = tokens_of(text)
    ids = ids_of(text)
    trained = count_of(targets, ids)
    first = 2 * mesh.get_local_rank("data")
    rows, columns = slice(first, first + 2), group.slice(text.length, CHUNK)
    share = count_of(targets[rows], None if ids is None else ids[rows]) / trained
    tokens, targets, ids = (None if x is None else x[rows, columns] for x in (tokens, targets, ids))
    loss = model.loss(tokens, targets, ids, context=group) * share
    (loss * mesh.size()).backward()  # FSDP averages over the four ranks; here their losses must be summed
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["data"].get_group())
    return {
        "loss": total.item(),
        "gradients": {name: x.grad.full_tensor().numpy() for name, x in model.named_parameters()},
    }


def count_of(targets: Tensor, ids: Tensor | None) -> int:
    trained = targets != IGNORED
    if ids is not None:
        trained[:, :-1] &= ids[:, 1:] == ids[:, :-1]
    return int(trained.sum())


@cache
def meshes(world: dist.ProcessGroup) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh of pairs, and the mesh of all ranks."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    return pairs, pairs["data", "context"]._flatten("all")


def read_whole(variant: str, chunks: int, documents: str) -> dict[str, Any]:
    """Compute the results of ``read_shards`` on one device."""
    model, text = cases.model(variant), Text(2, chunks, documents, batch=4)
    loss = model.loss(*tokens_of(text), ids_of(text))
    loss.backward()
    return {"loss": loss.item(), "gradients": {name: x.grad.numpy() for name, x in model.named_parameters()}}


def refusal(lengths: tuple[int, ...], read: int = 0, ids: tuple[bool, ...] = (False,) * 4) -> str:
    """Return the error of a call in which rank r holds ``lengths[r]`` tokens, after a state of ``read`` tokens."""
    model, rank = cases.model("gecko"), dist.get_rank()
    state = model(cases.tokens(1, read))[1] if read else None
    tokens = cases.tokens(1, lengths[rank])
    try:
        model(tokens, torch.zeros_like(tokens) if ids[rank] else None, state, context=group_of(4))
    except ValueError as error:
        return str(error)
    return "no error"


def slice_refusal(length: int) -> str:
    try:
        group_of(4).slice(length, CHUNK)
    except ValueError as error:
        return str(error)
    return "no error"


def prefill(variant: str, length: int, read: int, piece: int, ranks: int) -> dict[str, Any]:
    """Return the logits and the state of a text that is read by one process or by several ranks, the last ``length``
    tokens after the others."""
    model, text = cases.model(variant), cases.tokens(1, read + length, seed=5)[0]
    if ranks == 1:
        reading = read_text(model, [text])
    elif (group := group_of(ranks)) is None:
        return {}
    else:
        state = None if read == 0 else read_text(model, [text[:read]]).state
        parts = text[read:].split([length // 3, length - length // 3])
        reading = prefill_on_several(model, parts, group, state, piece=piece)
    return {"logits": reading.logits.numpy(), **arrays(reading.state.tensors())}


def autocast_losses(variant: str) -> tuple[float, float]:
    """Return the loss on four ranks and on one, with bfloat16 matrix products."""
    group, text = group_of(4), Text(4, 2, "few")
    model = cases.model(variant, torch.float32)
    tokens, targets = tokens_of(text)
    ids, columns = ids_of(text), group.slice(text.length, CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        shared = model.loss(tokens[:, columns], targets[:, columns], ids[:, columns], context=group)
        shared.backward()
        return shared.item(), model.loss(tokens, targets, ids).item()
