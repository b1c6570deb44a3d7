"""Working memory token by token, as the equations read."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.segments import Segments

if TYPE_CHECKING:
    from gecko.ops.working_memory import WorkingMemoryState


def working_memory_reference(
    inputs: tuple[Tensor, Tensor, Tensor],
    chunk_size: int,
    rule: Literal["adaptive", "linear"],
    state: WorkingMemoryState,
    segments: Segments,
) -> tuple[Tensor, WorkingMemoryState]:
    """Same contract as ``working_memory``; one row at a time."""
    outputs, states = [], []
    for row in range(segments.batch):
        one = state.map(operator.itemgetter(row))
        out, one = _read_row([x[row] for x in inputs], chunk_size, rule, one, segments.select([row]))
        outputs.append(out)
        states.append(one)
    parts = [iter(one.tensors().values()) for one in states]
    return torch.stack(outputs), state.map(lambda _: torch.stack([next(part) for part in parts]))


def _read_row(
    inputs: list[Tensor], c: int, rule: Literal["adaptive", "linear"], state: WorkingMemoryState, segments: Segments
) -> tuple[Tensor, WorkingMemoryState]:
    adaptive = rule == "adaptive"
    memory, norm, previous, current, resets = (
        state.memory, state.normaliser, state.previous, state.current, state.previous_resets)  # fmt: skip
    empty = type(current)(torch.full_like(norm, -1e30 if adaptive else 0.0), torch.zeros_like(previous.key_sum),
                          torch.zeros_like(previous.value_sum))  # fmt: skip
    outputs, position = [], int(segments.clock.position)
    for t, (q, k, v) in enumerate(zip(*(x.unbind(1) for x in inputs), strict=True)):
        start = int(segments.document_starts[0, t])
        chunk_start = (position + t) // c * c
        if segments.starts is not None and segments.starts[0, t]:
            current = empty
        psi_q, psi_k = (x.softmax(-1) if adaptive else F.elu(x) + 1 for x in (q, k))
        found = torch.einsum("hz,hzv->hv", psi_q, memory)
        if not adaptive:
            found = found / (psi_q * norm).sum(-1, keepdim=True)
        outputs.append(found if start < chunk_start - c else torch.zeros_like(found))

        if adaptive:
            weight = torch.logaddexp(current.weight, k)
            old, new = (current.weight - weight).exp(), (k - weight).exp()
        else:
            weight, old, new = current.weight + psi_k, torch.ones_like(k), psi_k
            before = previous.weight + (0 if resets else norm)
            before = torch.zeros_like(before) if start >= chunk_start else before
            total = (psi_k * before).sum(-1, keepdim=True)
            psi_k = psi_k / total if bool((total > 0).all()) else torch.zeros_like(psi_k)
        current = type(current)(
            weight,
            old[..., None] * current.key_sum + new[..., None] * psi_k[:, None],
            old[..., None] * current.value_sum + new[..., None] * v[:, None],
        )
        if (position + t + 1) % c == 0:
            if resets:
                memory, norm = torch.zeros_like(memory), empty.weight
            written = previous.value_sum - previous.key_sum @ memory
            if adaptive:
                norm = torch.logaddexp(norm, previous.weight)
                rho = (previous.weight - norm).exp()[..., None]
                memory = (1 - rho) * memory + rho * written
            else:
                norm, memory = norm + previous.weight, memory + written
            previous, current = current, empty
            resets = torch.tensor(start >= chunk_start, device=q.device)
    return torch.stack(outputs, dim=1), type(state)(memory, norm, previous, current, resets)
