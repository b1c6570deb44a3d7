"""Rows of a batch that stand at different places in their attention chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.records import TensorRecord
from gecko.segments import Segments

State = TypeVar("State", bound=TensorRecord)


def common_phase(segments: Segments, period: int) -> int | None:
    """Position modulo ``period`` where all rows agree on it, else None."""
    return segments.shared(("phase", period), lambda: _common(segments.clock.position % period))


def _common(numbers: Tensor) -> int | None:
    several = set(numbers.tolist())
    return several.pop() if len(several) == 1 else None


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros before and after the second to last dimension; x itself, not a copy, where there are none."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def run_by_phase(
    form: Callable[[tuple[Tensor, ...], State, Segments], tuple[Tensor, State]],
    inputs: tuple[Tensor, ...],
    state: State,
    segments: Segments,
    period: int,
) -> tuple[Tensor, State]:
    """Run ``form`` once for each group of rows that agree on their phase. All tensors are batch first."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row, position in enumerate(segments.clock.position.tolist()):
        groups[position % period].append(row)
    outputs, states = [], []
    for rows in groups.values():
        index = torch.tensor(rows, device=inputs[0].device)
        some = tuple(x.index_select(0, index) for x in inputs)
        part = state.map(partial(torch.index_select, dim=0, index=index))
        output, part = form(some, part, segments.select(rows))
        outputs.append(output)
        states.append(part)
    order = torch.tensor([row for rows in groups.values() for row in rows]).argsort().to(inputs[0].device)
    return torch.cat(outputs).index_select(0, order), _reorder(states, order)


def _reorder(states: list[State], order: Tensor) -> State:
    parts = [iter(state.tensors().values()) for state in states]
    return states[0].map(lambda _: torch.cat([next(part) for part in parts]).index_select(0, order))
