"""Loss and gradients of a part of a batch as one CUDA graph for each shape, which later parts replay.

The first part of a shape is computed as without a graph, which compiles kernels. The second is computed once more from
the graph's buffers, without its documents, and captured; the others replay. A replay depends on nothing of a batch but
tokens, targets, weight and what ``Segments.shared`` built from the documents, which are in buffers that are filled
before it. A graph serves every batch whose layout has tensors of the same shapes, and is the same in all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gecko.models import LanguageModel
from gecko.models.gecko import trained_targets
from gecko.parallel.mesh import ALONE, Ranks
from gecko.parallel.sharding import WholeModel
from gecko.runtime.tensors import without_copies
from gecko.segments import Segments
from gecko.train.run import Precision
from gecko.train.step import BatchPart, add_gradients, autocast

MOST_GRAPHS = 8
"""Graphs that are kept; a new one takes the place of that which was not used for longest."""
_FAILED = list[Any]()
"""Graphs whose capture failed. PyTorch's allocator may still call them, so they must not be freed."""

Given = tuple[Tensor, Tensor, Tensor]
"""Tokens (B, T), trained targets (B, T) and weight () of a part."""


def check_capture(device: torch.device) -> None:
    """Raise ValueError unless steps can be captured on the device."""
    if device.type != "cuda":
        raise ValueError(f"capture=true takes a CUDA device; got {device.type}. Set capture=false.")


class CapturedGradients:
    """Computes what ``compute_gradients`` computes, from graphs, in gradients that stay where they are. Several ranks
    gather the whole parameters before, and sum the gradients afterwards, outside the graphs. Hooks of modules run only
    while a graph is captured."""

    def __init__(self, model: LanguageModel, precision: Precision, ranks: Ranks = ALONE) -> None:
        self._ranks, self._whole = ranks, WholeModel(model) if ranks.world > 1 else None
        self.model = model if self._whole is None else self._whole.model
        self._precision, self._most = precision, MOST_GRAPHS
        self._graphs: list[_Graph] = []
        """That which was used last comes first."""
        self._gradients: dict[torch.nn.Parameter, Tensor] = {}
        """Those into which graphs add."""
        self._fixed: list[Any] = []
        """Addresses and settings that graphs depend on, at the last step; empty if it failed."""
        self._recorder = Recorder(next(model.parameters()).device)

    def __call__(self, parts: Sequence[BatchPart]) -> Tensor:
        """Replace the parameters' gradients by those of all ranks' parts, and return their loss, () float64 on the
        device.

        RuntimeError: a step of this model and shape cannot be captured. OutOfMemoryError: the memory does not suffice.
        """
        if self._whole is None:
            return self._fitting(parts)
        self._whole.gather()
        loss = self._fitting(parts)
        self._whole.reduce()
        return self._ranks.sum_on_device(loss)

    def _fitting(self, parts: Sequence[BatchPart]) -> Tensor:
        """Compute on this rank, with one graph if several do not fit."""
        try:
            return self._sum(parts)
        except torch.OutOfMemoryError:
            if self._most == 1:
                raise
        self._most = 1  # from now on; here, as the error keeps activations
        self._drop()
        return self._sum(parts)

    def _sum(self, parts: Sequence[BatchPart]) -> Tensor:
        every, buffers = list(self.model.parameters()), self.model.buffers()
        fixed = [
            self.model.z_loss, self.model.activation_checkpointing, *((x.data_ptr(), x.requires_grad) for x in every),
            *(x.data_ptr() for x in buffers),
        ]  # fmt: skip
        if self._fixed != fixed:
            self._drop()
            # Made before activations are: memory between these could not be given to graphs.
            self._gradients = {x: torch.zeros_like(x) for x in every if x.requires_grad}
        self._fixed = []
        for parameter in every:  # others may have been put in their place
            parameter.grad = self._gradients.get(parameter)
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))
        total = torch.zeros((), dtype=torch.float64, device=parts[0].tokens.device)
        with _without_unused(list(self._gradients)) if not self._graphs else nullcontext():
            for part in parts:
                total += self._part(part)  # before the next replay overwrites it
        self._gradients = {x: x.grad for x in every if x.grad is not None}
        self._fixed = fixed
        return total

    def _drop(self, kept: int = 0) -> None:
        """Drop all graphs but those that were ``kept`` last."""
        dropped = self._graphs[kept:]
        if any(graph.replay for graph in dropped):
            self._recorder.wait()  # it may be replaying them
        self._graphs = self._graphs[:kept]
        if dropped and not any(graph.replay for graph in self._graphs):
            self._recorder.forget()

    def _part(self, part: BatchPart) -> Tensor:
        ids, device = part.segment_ids, part.tokens.device
        segments = Segments.build(*ids.shape, segment_ids=ids, device=device)
        segments = dataclasses.replace(segments, keeps_state=False)
        given = part.tokens, trained_targets(part.tokens, part.targets, ids), part.weight
        graph = next((graph for graph in self._graphs if graph.takes(given, segments)), None)
        if graph is None:
            self._drop(self._most - 1)
            loss = self._compute(given, segments)
            self._graphs.insert(0, _Graph(given, segments))
            return loss
        self._graphs.remove(graph)
        self._graphs.insert(0, graph)
        return self._capture(graph) if graph.replay is None else graph.replay()

    def _capture(self, graph: _Graph) -> Tensor:
        try:
            loss, graph.replay = self._recorder(lambda: self._compute(graph.given, graph.segments))
        except (RuntimeError, TypeError) as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
                cause = cause.__context__
            if cause is not None:
                raise cause from None
            raise RuntimeError(f"a step of this model cannot be captured: {error}. Set capture=false.") from error
        return loss

    def _compute(self, given: Given, segments: Segments) -> Tensor:
        tokens, targets, weight = given
        with autocast(self._precision, tokens.device):
            mean = self.model.loss_of_layout(tokens, targets, segments)
        return add_gradients(mean, weight)


@contextmanager
def _without_unused(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Within the context, ``parameters`` get gradients; afterwards those that did not have None."""
    used = set[Tensor]()
    hooks = [x.register_post_accumulate_grad_hook(used.add) for x in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for parameter in parameters:
        parameter.grad = parameter.grad if parameter in used else None


class _Graph:
    """Buffers of parts of one shape, and the graph that reads them."""

    def __init__(self, given: Given, segments: Segments) -> None:
        self.given: Given = (given[0].clone(), given[1].clone(), given[2].clone())
        self.segments = segments.unread()
        """Layout whose tensors are buffers."""
        self.replay: Callable[[], Tensor] | None = None
        """Returns the loss, until the next replay. None: the part was seen once."""
        self._builders = segments.builders
        self._layout = {key: _leaves(segments.shared(key, build)) for key, build in segments.builders.items()}
        if any(x.device != segments.device for layout in self._layout.values() for x in layout if _is_tensor(x)):
            raise RuntimeError("a captured step reads no tensors of the host. Set capture=false.")

    def takes(self, given: Given, segments: Segments) -> bool:
        """Return whether the graph computes a part with this layout; then its buffers hold the part."""
        if given[0].shape != self.given[0].shape or (segments.starts is None) != (self.segments.starts is None):
            return False
        buffers, values = list(self.given), list(given)
        # Without documents, the layout depends on nothing but the shape.
        for key, build in self._builders.items() if segments.starts is not None else ():
            new = _leaves(segments.shared(key, build))
            if list(map(_kind, new)) != list(map(_kind, self._layout[key])):
                return False
            buffers += filter(_is_tensor, self._layout[key])
            values += filter(_is_tensor, new)
        torch._foreach_copy_(buffers, values)
        return True


class Recorder:
    """Captures launches on a device as CUDA graphs, which use the same memory one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def wait(self) -> None:
        """Wait for the device, before a graph is dropped which it may be replaying."""
        torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """Give the memory of graphs back, after the last one was dropped: later ones cannot use it."""
        self._pool = None
        torch.cuda.empty_cache()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Compute once, on a stream of its own, and capture the same launches. Return what was computed, and a function
        that replays them and returns what they compute, which lasts until the next replay."""
        with torch.cuda.device(self._device):
            here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            self._stream = stream = self._stream or torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                first = compute()
            here.wait_stream(stream)
            # Other threads, as those that read data, may use the device meanwhile.
            capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="relaxed")
            try:
                with torch.cuda.stream(here), without_copies(), capture:  # a failed capture leaves its stream current
                    result = compute()
            except BaseException:
                _FAILED.append(graph)
                self._pool = None
                raise

        def replay() -> Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return result

        return first, replay


def _leaves(value: Any) -> list[Any]:
    """Return the tensors and other values that a layout consists of. RuntimeError: part of it is neither."""
    if value is None or isinstance(value, Tensor | int | float):
        return [value]
    if isinstance(value, list | tuple):
        return [len(value), *(leaf for item in value for leaf in _leaves(item))]
    if not dataclasses.is_dataclass(value) or isinstance(value, Segments):
        raise RuntimeError(
            f"a step with a {type(value).__name__} in its layout cannot be captured. Try a sequence_length that is a "
            "power of two or a multiple of 512, or capture=false."
        )
    return [leaf for field in dataclasses.fields(value) for leaf in _leaves(getattr(value, field.name))]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _kind(leaf: Any) -> Any:
    """Return what must be the same in all layouts of a graph."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
