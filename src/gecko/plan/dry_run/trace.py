"""Collectives and sends of one rank in a step, and the rule that those of several ranks must fit together.

A job hangs if the members of a process group start different collectives, or if a rank waits for a tensor that another
does not send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gecko.runtime.private import group_of_collective

_SEND, _RECEIVE = "send", "recv_"
_WAIT = "wait_tensor"


@dataclass(frozen=True)
class Call:
    """One collective, send or receive."""

    operation: str
    group: tuple[int, ...]
    """Ranks of the process group."""
    tensors: tuple[tuple[str, int], ...]
    """Dtype and number of elements of each tensor."""
    peer: int | None = None
    """The other rank of a send or receive."""

    def __str__(self) -> str:
        what = ", ".join(f"{count:,} × {dtype}" for dtype, count in self.tensors)
        return f"{self.operation.strip('_')} of {what}" if what else self.operation


class Trace:
    """Calls of one rank, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
        if operation.namespace not in ("c10d", "_c10d_functional") or operation._opname == _WAIT:
            return
        name, ranks = operation._opname, tuple(dist.get_process_group_ranks(group_of_collective(operation, arguments)))
        tensors = tuple((str(x.dtype).removeprefix("torch."), x.numel()) for x in given)
        peer = ranks[arguments[2]] if name in (_SEND, _RECEIVE) else None
        self.calls.append(Call(name, ranks, tensors, peer))

    def restart(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def add(self, operation: str, group: Iterable[int]) -> None:
        """Add a collective on values of the host."""
        self.calls.append(Call(operation, tuple(group), ()))

    def collectives(self) -> dict[tuple[int, ...], list[Call]]:
        """Return the collectives by process group."""
        found = defaultdict(list)
        for call in self.calls:
            if call.peer is None:
                found[call.group].append(call)
        return found

    def messages(self, operation: str) -> dict[int, list[Call]]:
        """Return the sends or receives by the other rank."""
        found = defaultdict(list)
        for call in self.calls:
            if call.operation == operation and call.peer is not None:
                found[call.peer].append(call)
        return found


@dataclass(frozen=True)
class Agreement:
    """What was compared."""

    groups: int
    """Process groups of which several ranks were compared."""
    collectives: int
    """Collectives of a rank, on average."""
    messages: int
    """Sends that were paired with a receive."""


def check_traces(traces: Mapping[int, Trace]) -> Agreement:
    """Compare the traces of some ranks, by rank. Raise ValueError if two ranks of a process group start different
    collectives, or a send has no receive, or a receive no send, among these ranks."""
    groups: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(dict)
    for rank, trace in traces.items():
        for group, calls in trace.collectives().items():
            for member in group:
                if member in traces:
                    groups[group].setdefault(member, [])
            groups[group][rank] = calls
    for group, members in groups.items():
        first, *others = members
        for other in others:
            _check_equal(first, members[first], other, members[other], f"the process group of ranks {_shown(group)}")
    paired = sum(_check_messages(traces, source, target) for source in traces for target in traces if source != target)
    compared = sum(len(members) > 1 for members in groups.values())
    collectives = sum(len(calls) for members in groups.values() for calls in members.values())
    return Agreement(compared, round(collectives / len(traces)), paired)


def _check_equal(first: int, expected: list[Call], other: int, calls: list[Call], where: str) -> None:
    for i, (a, b) in enumerate(zip_longest(expected, calls)):
        if a != b:
            raise ValueError(
                f"all ranks of a process group must start the same collectives in the same order; in {where}, number "
                f"{i + 1} is {a or 'none'} on rank {first} and {b or 'none'} on rank {other}. Training would hang."
            )


def _check_messages(traces: Mapping[int, Trace], source: int, target: int) -> int:
    sent = traces[source].messages(_SEND).get(target, [])
    received = traces[target].messages(_RECEIVE).get(source, [])
    for i, (a, b) in enumerate(zip_longest(sent, received)):
        if a is None or b is None or (a.group, a.tensors) != (b.group, b.tensors):
            raise ValueError(
                f"each send must have a receive of the same tensor; from rank {source} to rank {target}, number "
                f"{i + 1} is {a or 'no send'} and {b or 'no receive'}. Training would hang."
            )
    return len(sent)


def _shown(group: tuple[int, ...]) -> str:
    return ", ".join(map(str, group)) if len(group) <= 8 else f"{group[0]}, {group[1]}, … {group[-1]}"
