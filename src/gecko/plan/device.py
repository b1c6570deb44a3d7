"""A GPU that computes nothing: operations on its tensors return tensors of the right shapes, without numbers.

Tensors on the host are real, so the layout of documents, the order of collectives and all choices of the code are those
of training. Tensors on the device are PyTorch's fake tensors. They say that they are on a GPU, so operators choose what
they choose there; for PyTorch they are on the CPU, because autograd of CUDA tensors needs a PyTorch that was built with
CUDA. A GPU is neither needed nor used.

``MemoryLedger`` watches every allocation and release over a step, in order, and what the memory was used for; ``Trace``
the collectives and sends of a rank. A job hangs if the members of a process group start different collectives, or if a
rank waits for a tensor that another does not send, so those of several ranks must fit together.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import permutations, zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only

from gecko.ops.backends import dispatch
from gecko.runtime.private import active_fake_mode, dispatch_modes, fake_tensors, group_of_collective
from gecko.train import capture

DEVICE = torch.device("cpu")
"""Where tensors of the device are for PyTorch."""

_HOST_DTYPES = torch.int64, torch.int32, torch.int16, torch.bool
_READS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default
Watch = Callable[[Any, tuple[Any, ...], list[Tensor], Any], None]
"""Sees an operation after it ran: itself, its arguments, the tensors among these as they were, and the result."""


def is_on_device(x: Any) -> bool:
    """Return whether x is a tensor of the device."""
    return isinstance(x, fake_tensors().FakeTensor)


class FakeGPU(TorchDispatchMode):
    """A simulated GPU, used in the context ``running``; ``watches`` see every operation, those on the host too.

    An operation runs on the GPU if an input is there, or if it creates a tensor with ``device=`` whose dtype is neither
    bool nor a signed integer of 16 to 64 bits: those hold layouts and positions, which the host computes. Inputs on the
    host are copied to the GPU. A number that the host reads from it is always 1.
    """

    def __init__(self, *watches: Watch) -> None:
        super().__init__()
        self._watches = watches
        self._module = fake_tensors()
        self._fakes = self._module.FakeTensorMode()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which code uses the device."""
        fake = self._module.FakeTensor
        patches = [
            patch.object(fake, "is_cuda", True, create=True),
            patch.object(fake, "data_ptr", lambda _: 0, create=True),  # captured steps ask whether parameters moved
            patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),  # broadcasts ask for it
            # Operators do what they do where no mode watches, and what they allocate inside is seen.
            patch.object(dispatch, "dispatch_modes", lambda: dispatch_modes() - 2),
            patch.object(dispatch, "PLAIN", (*dispatch.PLAIN, fake)),
            patch.object(dispatch, "_cpu_kernels_installed", lambda: False),
            patch.object(dispatch.Launch, "run", lambda launch: None),
            patch.object(capture, "Recorder", lambda _: lambda compute: (compute(), compute)),
        ]
        with ExitStack() as stack:
            for context in (self._fakes, *patches, self):
                stack.enter_context(context)
            yield

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation.namespace == "prim":
            return operation(*arguments)  # asks for a device; of all operations every second one
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes with its local tensors, which come here
        if active_fake_mode() is not self._fakes:
            return operation(*arguments, **options)  # DTensor asks for a shape
        given = [x for x in arg_tree_leaves(*arguments, **options) if isinstance(x, Tensor)]
        on_device, device = [is_on_device(x) for x in given], options.get("device")
        result: Any
        if any(on_device) and operation in _READS:
            result = 1.0 if arguments[0].is_floating_point() else 1  # losses and norms are finite
        elif any(on_device):
            if not all(on_device):
                arguments, options = tree_map_only(Tensor, self._placed, (arguments, options))
            result = operation(*arguments, **options)
        else:
            creates = device is not None and device.type != "meta" and all(x.is_meta for x in given)
            result = operation(*tree_map_only(Tensor, self._placed, arguments), **options) if creates else None
            if result is None or result.dtype in _HOST_DTYPES:
                with self._module.unset_fake_temporarily():
                    result = operation(*arguments, **options)
        for watch in self._watches:
            watch(operation, arguments, given, result)
        return result

    def _placed(self, x: Tensor) -> Any:
        return x if is_on_device(x) else self._fakes.from_tensor(x, static_shapes=True)


UNIT = 512
"""Bytes that PyTorch's allocator for CUDA rounds a size up to."""

PARAMETERS, GRADIENTS, OPTIMIZER = OWNED = "parameters", "gradients", "optimizer"
KEPT, WORK, LOSS = "activations kept", "block in progress", "logits and loss"
COMMUNICATION, CARRIED, OTHER = "communication buffers", "carried states", "other"
_COMMUNICATION = "c10d", "_c10d_functional", "fsdp"
"""Namespaces of the operations on communication buffers."""


class Peak(NamedTuple):
    """The largest memory in use at one time: its bytes, in total and by use, and the part of the step."""

    total: int
    uses: dict[str, int]
    moment: str


class MemoryLedger:
    """Allocations and releases of the memory of fake tensors. ``recording`` is the context of the step.

    What memory is used for may become known after it was allocated, so peaks are computed in the end.
    """

    def __init__(self) -> None:
        self.use = OTHER
        """Use of memory that is allocated from now on; ``mark`` changes it."""
        self.moment = ""
        """Name of the present part of the step."""
        self._changes: list[tuple[int, int, str]] = []
        self._uses: list[str] = []
        self._begin = 0
        self._alive: dict[int, tuple[int, int, Any]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which memory may be resized, as FSDP does to free gathered parameters; that is no operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._update(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], result: Any) -> None:
        results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        tensors = [x for x in (*given, *results) if is_on_device(x)]
        for x in tensors:
            self._number(x)
        if operation.namespace in _COMMUNICATION:
            self.mark((x for x in tensors if self._uses[self._number(x)] not in OWNED), COMMUNICATION)

    def mark(self, tensors: Iterable[Any], use: str) -> None:
        """Set what the memory of the fake tensors among ``tensors`` is used for."""
        for x in tensors:
            if is_on_device(x):
                self._uses[self._number(x)] = use

    def relabel(self, before: str, after: str) -> None:
        """Change the use of the memory that is in use for ``before`` now."""
        for number, _, _ in self._alive.values():
            if self._uses[number] == before:
                self._uses[number] = after

    def restart(self) -> None:
        """Start a new measurement: ``peak`` now counts the memory in use after any later allocation or release."""
        self._begin = len(self._changes)

    @property
    def in_use(self) -> int:
        return sum(size for _, size, _ in self._alive.values())

    def peak(self, moment: str | None = None) -> Peak:
        """Return the peak since ``restart``, or since the ledger was made; with ``moment``, that of this part."""
        total = most = end = 0
        for i, (_, change, now) in enumerate(self._changes):
            total += change
            if total > most and i >= self._begin and moment in (None, now):
                most, end = total, i + 1
        uses: dict[str, int] = dict.fromkeys(self._uses, 0)
        for number, change, _ in self._changes[:end]:
            uses[self._uses[number]] += change
        moment = self._changes[end - 1][2] if end else ""
        return Peak(most, {use: size for use, size in uses.items() if size}, moment)

    def _number(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._uses.append(self.use)
            self._alive[key] = len(self._uses) - 1, 0, weakref.ref(storage, partial(self._freed, key))
        self._update(storage)
        return self._alive[key][0]

    def _update(self, storage: torch.UntypedStorage) -> None:
        if (known := self._alive.get(storage._cdata)) is None:
            return
        (number, before, reference), size = known, -(-storage.nbytes() // UNIT) * UNIT
        if size != before:
            self._changes.append((number, size - before, self.moment))
            self._alive[storage._cdata] = number, size, reference

    def _freed(self, key: int, _: Any) -> None:
        number, size, _ = self._alive.pop(key)
        self._changes.append((number, -size, self.moment))


_SEND, _RECEIVE = "send", "recv_"


class Call(NamedTuple):
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
        name = operation._opname
        if operation.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            ranks = tuple(dist.get_process_group_ranks(group_of_collective(operation, arguments)))
            tensors = tuple((str(x.dtype).removeprefix("torch."), x.numel()) for x in given)
            self.calls.append(Call(name, ranks, tensors, ranks[arguments[2]] if name in (_SEND, _RECEIVE) else None))

    def parts(self) -> Mapping[tuple[Any, ...], list[Call]]:
        """Return the collectives by process group, and the sends and receives by operation and the other rank."""
        found: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
        for call in self.calls:
            found[call.group if call.peer is None else (call.operation, call.peer)].append(call)
        return found


class Agreement(NamedTuple):
    """Process groups of which several ranks were compared, collectives of a rank on average, sends with a receive."""

    groups: int
    collectives: int
    messages: int


def check_traces(traces: Mapping[int, Trace]) -> Agreement:
    """Compare the traces of some ranks, by rank. Raise ValueError if two ranks of a process group start different
    collectives, or a send has no receive, or a receive no send, among these ranks."""
    parts = {rank: trace.parts() for rank, trace in traces.items()}
    groups = {call.group for trace in traces.values() for call in trace.calls if call.peer is None}
    compared = collectives = messages = 0
    for group in sorted(groups, key=len):
        first, *others = (rank for rank in group if rank in traces)
        for other in others:
            for i, (a, b) in enumerate(zip_longest(parts[first][group], parts[other][group])):
                if a != b:
                    named = ", ".join(map(str, group)) if len(group) <= 8 else f"{group[0]}, {group[1]}, … {group[-1]}"
                    raise ValueError(
                        "all ranks of a process group must start the same collectives in the same order; in the "
                        f"process group of ranks {named}, number {i + 1} is {a or 'none'} on rank {first} and "
                        f"{b or 'none'} on rank {other}. Training would hang."
                    )
        compared += bool(others)
        collectives += sum(len(parts[rank][group]) for rank in (first, *others))
    for source, target in permutations(traces, 2):
        sent, received = parts[source][_SEND, target], parts[target][_RECEIVE, source]
        for i, (a, b) in enumerate(zip_longest(sent, received)):
            if a is None or b is None or (a.group, a.tensors) != (b.group, b.tensors):
                raise ValueError(
                    f"each send must have a receive of the same tensor; from rank {source} to rank {target}, number "
                    f"{i + 1} is {a or 'no send'} and {b or 'no receive'}. Training would hang."
                )
        messages += len(sent)
    return Agreement(compared, round(collectives / len(traces)), messages)
