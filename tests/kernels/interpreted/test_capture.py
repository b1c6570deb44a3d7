"""Steps from captured graphs equal eager ones bit for bit, for batches of other documents, shapes and parts.

In the place of a graph, the launches of a replay are made again, from the same buffers and without the documents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch
from kernels.agreement import small_model
from torch import Tensor

from gecko import Gecko
from gecko.data import Batch
from gecko.models import Llama, LlamaConfig
from gecko.ops.cema import varlen_tiles
from gecko.runtime.tensors import to_device, without_copies
from gecko.segments import Segments
from gecko.train import capture
from gecko.train.capture import CapturedGradients, Recorder, check_capture
from gecko.train.optimizer import build_optimizer
from gecko.train.settings import OptimizerSettings
from gecko.train.step import Step, compute_gradients, split_batch

LENGTH = 32
ATTENTION = "llama-without-sinks"
"""A variant that takes little time here."""
CPU = torch.device("cpu")
STARTS = ([[19], [30]], [[8], [16]], [[7], [25]])
"""Where the second document of each row starts, of three batches; those of one start where chunks do."""


class Repeated:
    """Makes launches again in the place of a graph's replay: they add to the gradients of the time of the capture."""

    graphs: int
    model: torch.nn.Module
    wait = forget = staticmethod(lambda: None)

    def __init__(self, _: torch.device) -> None:
        Repeated.graphs = 0

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        def replay() -> Tensor:
            now = [x.grad for x in parameters]
            try:
                for parameter, grad in zip(parameters, then, strict=True):
                    parameter.grad = grad
                with without_copies():
                    return compute()
            finally:
                for parameter, grad in zip(parameters, now, strict=True):
                    parameter.grad = grad

        Repeated.graphs += 1
        parameters, first = list(Repeated.model.parameters()), compute()
        then = [x.grad for x in parameters]
        return first, replay


@pytest.fixture(autouse=True)
def _repeated(on_kernels, monkeypatch):
    monkeypatch.setattr(capture, "Recorder", Repeated)


def _batch(number: int, starts: list[list[int]] | None, length: int = LENGTH) -> Batch:
    tokens = torch.randint(32, (2, length + 1), generator=torch.Generator().manual_seed(number))
    ids = torch.zeros(2, length, dtype=torch.int64)
    return Batch(
        tokens[:, :-1], tokens[:, 1:], ids if starts is None else ids + (torch.arange(length) >= torch.tensor(starts))
    )


def _captured(model: Gecko | Llama, precision: str = "float32") -> CapturedGradients:
    Repeated.model = model
    return CapturedGradients(model, precision)


class Pair:
    """A model that is captured, and an equal one that is not."""

    def __init__(self, model: Gecko | Llama, precision: str = "float32") -> None:
        self.model, self.eager, self.precision = model, copy.deepcopy(model), precision
        self.captured = _captured(model, precision)

    def compare(self, batch: Batch, parts: int = 1) -> None:
        """Assert that loss and gradients of a batch are equal."""
        given = split_batch(batch, parts, CPU)
        self.eager.zero_grad()
        assert torch.equal(self.captured(given), compute_gradients(self.eager, given, self.precision))
        for (name, mine), wanted in zip(self.model.named_parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(mine.grad, wanted.grad), name


def _compare(model: Gecko | Llama, batches: list[Batch], precision: str = "float32", parts: int = 1) -> None:
    """Compare loss and gradients of each batch; the weights change between them."""
    pair = Pair(model, precision)
    for batch in batches:
        pair.compare(batch, parts)
        for x in (*pair.model.parameters(), *pair.eager.parameters()):
            x.data.add_(x.grad, alpha=-0.1)


@pytest.mark.parametrize(
    ("variant", "precision", "checkpointing"),
    [("gecko", "bfloat16", "none"), ("gecko", "float32", "selective"), ("window-linear", "float32", "full")],
)
def test_other_documents(variant, precision, checkpointing):
    model = small_model(variant)
    model.activation_checkpointing = checkpointing
    _compare(model, [_batch(i, starts) for i, starts in enumerate(STARTS)], precision)
    assert Repeated.graphs == 1


def test_other_shapes_and_parts():
    """Batches with documents and without take turns with shorter ones; each has two parts, of a row each."""
    kinds = (STARTS[0], LENGTH), (None, LENGTH), ([[3], [9]], 16), (STARTS[2], LENGTH)
    _compare(small_model("gecko"), [_batch(i, *kind) for i, kind in enumerate(kinds)], parts=2)
    assert Repeated.graphs == 3


def test_layouts_of_other_sizes_have_their_own_graphs(monkeypatch):
    """A plan without room for more documents serves only batches with as many items; all results stay right."""
    monkeypatch.setattr(varlen_tiles, "_capacity", lambda tiles, *_: tiles)
    many = _batch(7, None)
    many = Batch(many.tokens, many.targets, torch.arange(LENGTH).expand(2, -1).contiguous())
    _compare(small_model("no-memory"), [_batch(0, STARTS[0]), many, _batch(1, STARTS[1]), many, _batch(2, STARTS[2])])
    assert Repeated.graphs == 2


def test_only_so_many_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(capture, "MOST_GRAPHS", 1)
    _compare(small_model(ATTENTION), [_batch(i, kind) for i, kind in enumerate((STARTS[0], None, *STARTS[1:]))])
    assert Repeated.graphs == 1


def test_parameters_that_moved_are_not_read_where_they_were():
    model = small_model(ATTENTION)
    captured, given = _captured(model), split_batch(_batch(0, STARTS[0]), 1, CPU)
    for _ in range(2):
        captured(given)
    weight = next(model.parameters())
    weight.data = weight.data.clone()
    captured(given)
    assert Repeated.graphs == 1
    captured(given)
    assert Repeated.graphs == 2


def test_with_too_little_memory_for_several_graphs_there_is_one(monkeypatch):
    """The step of the second shape finds no memory beside the first graph, and is made again without it."""
    pair = Pair(small_model(ATTENTION))
    compute, dropped = CapturedGradients._compute, 0

    def compute_if_alone(self: CapturedGradients, given: tuple[Tensor, Tensor, Tensor], segments: Segments) -> Tensor:
        nonlocal dropped
        loss = compute(self, given, segments)
        others = [graph for graph in self._graphs if graph.given[0].shape != given[0].shape]
        if given[0].shape[1] == 16 and any(graph.replay for graph in others):
            dropped += 1
            raise torch.OutOfMemoryError("no memory beside a graph")
        return loss

    monkeypatch.setattr(CapturedGradients, "_compute", compute_if_alone)
    for number, length in enumerate((LENGTH, LENGTH, LENGTH, 16, 16, 16, LENGTH)):
        pair.compare(_batch(number, [[3], [9]], length))
    assert dropped == 1


def test_a_parameter_that_is_frozen_loses_its_gradient():
    model = small_model(ATTENTION)
    captured, given = _captured(model), split_batch(_batch(0, STARTS[0]), 1, CPU)
    for frozen in (False, False, True, True):
        model.embedding.weight.requires_grad_(not frozen)
        captured(given)
        assert (model.embedding.weight.grad is None) == frozen
        assert model.final_norm.weight.grad is not None


def test_gradients_are_those_of_the_graph_whatever_others_left_there():
    """An evaluation that looks for values that are not finite puts None in their place, others their own tensors."""
    pair = Pair(small_model(ATTENTION))
    for number in range(4):
        pair.compare(_batch(number, STARTS[number % 3]))
        pair.model.zero_grad(set_to_none=True)
        if number == 2:
            first = next(pair.model.parameters())
            first.grad = torch.ones_like(first)


def test_steps_of_the_optimizer():
    """Losses, norms, verdicts and weights are those of eager steps."""
    results = []
    for captures in (False, True):
        model = small_model(ATTENTION)
        captured = _captured(model) if captures else None
        step = Step(model, build_optimizer(model, OptimizerSettings()), 1.0, "float32", captured=captured)
        for number in range(5):
            results.append(step.start(split_batch(_batch(number, STARTS[number % 3]), 2, CPU), 1e-2).wait())
        results.append([x.detach() for x in model.parameters()])
    assert results[:5] == results[6:11] and Repeated.graphs == 1
    assert all(map(torch.equal, results[5], results[11]))


@pytest.mark.parametrize("lost", range(3))
def test_a_buffer_that_is_not_filled_is_noticed(lost, monkeypatch):
    """Without it, the step would be that of another batch: tokens, targets, and a tensor of the layout."""
    copy_all = torch._foreach_copy_

    def copy_some(buffers: list[Tensor], values: list[Tensor]) -> None:
        left_out = lost if lost < 2 else next(i for i, x in enumerate(buffers[3:], 3) if not torch.equal(x, values[i]))
        kept = [i for i in range(len(buffers)) if i != left_out]
        copy_all([buffers[i] for i in kept], [values[i] for i in kept])

    monkeypatch.setattr(torch, "_foreach_copy_", copy_some)
    with pytest.raises(AssertionError):
        _compare(small_model(ATTENTION), [_batch(i, starts) for i, starts in enumerate(STARTS)])


def test_a_llama_without_documents():
    pytest.importorskip("transformers")
    config = LlamaConfig(vocab_size=32, num_layers=1, model_dim=16, num_heads=2, ffn_dim=16)
    _compare(Llama(config), [_batch(i, None) for i in range(3)])
    with pytest.raises(RuntimeError, match="cannot be captured"):
        _compare(Llama(config), [_batch(i, starts) for i, starts in enumerate(STARTS)])


@pytest.mark.parametrize(("changes", "length"), [({}, 36), ({"sinks": 2}, LENGTH)])
def test_a_step_whose_host_reads_documents_is_refused(changes, length):
    """CEMA's tokens before the first unit are computed from the documents, and so are sinks."""
    with pytest.raises(RuntimeError, match="capture=false"):
        _compare(small_model("gecko", **changes), [_batch(i, starts, length) for i, starts in enumerate(STARTS)])


def test_documents_that_are_not_built_cannot_be_read():
    segments = Segments.build(1, 4, segment_ids=torch.tensor([[0, 0, 1, 1]]))
    flags = segments.start_flags
    unread = segments.unread()
    assert unread.start_flags is flags
    for read in (lambda: unread.spans, lambda: unread.continues, lambda: unread.document_starts, lambda: unread.end):
        with pytest.raises((RuntimeError, TypeError)):
            read()
    with without_copies(), pytest.raises(RuntimeError, match="captured step"):
        to_device(torch.zeros(1), "cpu")


def test_a_graph_is_captured_after_the_launches_ran_once_and_copies_nothing(monkeypatch):
    """With a device that notes what is asked of it."""
    asked = MagicMock()
    for name in ("current_stream", "Stream", "CUDAGraph", "graph_pool_handle", "stream", "graph", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(asked, name))
    asked.graph.return_value.__enter__.side_effect = lambda: events.append("capture")
    asked.CUDAGraph.return_value.replay.side_effect = lambda: events.append("replay")
    events, recorder = [], Recorder(torch.device("cuda", 1))

    def compute() -> Tensor:
        events.append("compute")
        if events.count("compute") % 2 == 0:
            with pytest.raises(RuntimeError, match="captured step"):
                to_device(torch.zeros(1), "cpu")
        return torch.tensor(float(len(events)))

    for _ in range(2):
        events.clear()
        first, replay = recorder(compute)
        assert (float(first), float(replay()), events) == (1.0, 3.0, ["compute", "capture", "compute", "replay"])
    assert asked.graph_pool_handle.call_count == 1


def test_devices_that_capture_nothing_are_refused():
    with pytest.raises(ValueError, match="capture=true takes a CUDA device; got cpu"):
        check_capture(CPU)
