"""The C kernels under autocast: operands of products are rounded to bfloat16, everything else is float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import cases
from support.native_agreement import Form, calls, evaluate, needs_compiler, normal, on_two_threads
from torch import Tensor, nn

import gecko
from gecko.layers import project
from gecko.ops import feed_forward as feed_forward_file
from gecko.ops import loss as loss_file
from gecko.ops import projections as projections_file
from gecko.ops.backends import cpu as native
from gecko.ops.backends import dispatch as kernels
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention
from gecko.ops.chunk_attention import cpu as attention_file
from gecko.ops.common import linear_dtype
from gecko.ops.feed_forward import feed_forward
from gecko.ops.loss import IGNORED, linear_cross_entropy
from gecko.ops.projections import projections
from gecko.segments import Clock, Segments

pytestmark = needs_compiler
needs_products = pytest.mark.skipif(not native.multiplies_bfloat16(), reason="no bfloat16 products in this processor")

TOKENS = [1, 95, 96, 1000]
"""Numbers of tokens around a block, and odd numbers, over which weight gradients are summed."""

WIDTHS = [(32, 32), (64, 256), (96, 160), (288, 416)]
"""(inputs, outputs): packed weights of every width, and more pairs than the depth of one panel."""


@pytest.fixture(autouse=True)
def _kernels_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FEWEST_TOKENS", 1)


class _Rounded(torch.autograd.Function):
    """Compute a bᵀ in float64, with the operands rounded to bfloat16, also those of the gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(_round(a), _round(b))
        return _round(a) @ _round(b).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _round(grad) @ b, _round(grad).t() @ a


def _round(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _evaluate(operator: Form, leaves: list[Tensor]) -> list[Tensor]:
    """Evaluate with a gradient of 1 for a loss: it would be rounded before it is scaled."""
    return evaluate(operator, leaves, lambda weight: weight if weight.ndim else torch.ones_like(weight))


def _agree(operator: Form, exact: Form, leaves: list[Tensor], tolerance: float) -> None:
    """Assert that ``operator`` under autocast equals ``exact``, relative to the largest number of a tensor."""

    def under_autocast() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return _evaluate(operator, leaves)

    found, again = under_autocast(), on_two_threads(under_autocast)
    right = _evaluate(exact, [x.double() for x in leaves])
    for i, (got, repeated, wanted) in enumerate(zip(found, again, right, strict=True)):
        assert got.dtype == torch.float32
        assert torch.equal(got, repeated), f"number {i} on two threads"
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


def _weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return normal(outputs, inputs, seed=seed) / inputs**0.5


@needs_products
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_projections(tokens, widths):
    inputs, outputs = widths

    def operator(x: Tensor, first: Tensor, second: Tensor, bias: Tensor, onto: Tensor) -> tuple[Tensor, ...]:
        return projections(x, (first, second), (None, bias), onto)

    def exact(x: Tensor, first: Tensor, second: Tensor, bias: Tensor, onto: Tensor) -> tuple[Tensor, ...]:
        return _Rounded.apply(x, first), _Rounded.apply(x, second) + bias + onto

    weights = [_weight(64, inputs), _weight(outputs, inputs, seed=1)]
    leaves = [normal(tokens, inputs), *weights, normal(outputs), normal(tokens, outputs, seed=2)]
    _agree(operator, exact, leaves, 2e-6)


@needs_products
@pytest.mark.parametrize("tokens", TOKENS)
def test_feed_forward(tokens):
    """A number near a rounding border may be rounded the other way; then it is off by bfloat16's precision."""

    def exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, onto: Tensor) -> Tensor:
        hidden = nn.functional.silu(_Rounded.apply(x, gate)) * _Rounded.apply(x, up)
        return onto + _Rounded.apply(hidden, down)

    weights = [_weight(96, 64), _weight(96, 64, seed=1), _weight(64, 96)]
    _agree(feed_forward, exact, [normal(tokens, 64), *weights, normal(tokens, 64, seed=2)], 3e-4)


@needs_products
@pytest.mark.parametrize("vocabulary", [3, 64, 264])
@pytest.mark.parametrize("tokens", TOKENS)
def test_loss(tokens, vocabulary):
    targets = torch.arange(tokens) % vocabulary
    targets[1::3] = IGNORED

    def exact(hidden: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.cross_entropy(_Rounded.apply(hidden, weight), targets)

    leaves = [normal(tokens, 64), _weight(vocabulary, 64)]
    _agree(lambda hidden, weight: linear_cross_entropy(hidden, weight, targets), exact, leaves, 3e-4)


@needs_products
@pytest.mark.parametrize("length", [1, 9, 10, 33])
def test_attention_of_scores_far_below_zero(length):
    """With an odd number of queries, the last one shares a pair of lanes with no query."""
    ones = torch.ones(1, 1, length + 1, 16)
    q, k = (4 * ones).requires_grad_(), (-8 * ones).requires_grad_()
    v = normal(1, 1, length + 1, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = chunk_attention(q, k, v, Pattern(8, rope_heads=0))
    exact, _ = chunk_attention(q, k, v, Pattern(8, rope_heads=0))
    for found, wanted in zip(*(torch.autograd.grad(y.sum(), (q, k, v)) for y in (out, exact)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.01 * max(1.0, wanted.abs().max().item()))


@needs_products
def test_head_of_many_weights():
    """The logits, and so the loss, are float32."""
    hidden, weight, targets = normal(40, 32), _weight(20_000, 32), torch.arange(40)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    exact = linear_cross_entropy(*leaves, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves, targets)
    assert torch.equal(loss, exact)
    for found, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(exact, leaves), strict=True):
        assert found.dtype == torch.float32 and not torch.equal(found, wanted)
        assert (found - wanted).norm() < 5e-3 * wanted.norm()


@needs_products
@pytest.mark.parametrize("attention", ["sliding_chunk", "chunk", "sliding_window"])
@pytest.mark.parametrize(("chunk", "length", "value"), [(8, 45, 32), (16, 16, 64), (64, 333, 96), (64, 2, 32)])
def test_attention(monkeypatch, chunk, length, value, attention):
    """Read after two chunks, with documents at even and odd positions; tokens have bfloat16's precision."""
    begins, read = torch.tensor([[length // 3], [length // 2 + 1]]), torch.full((2,), 2 * chunk)
    ids = (torch.arange(length) >= begins).long()
    empty = AttentionState.empty(2, 2, chunk, 16, value)
    before = [normal(2, 2, 2 * chunk, size, seed=5) for size in (16, 16, value)]
    _, state = chunk_attention(*before, Pattern(chunk, attention), state=empty)

    def operator(*inputs: Tensor) -> Tensor:
        given = AttentionState(state.keys.to(inputs[0].dtype), state.values.to(inputs[0].dtype))
        segments = Segments.build(2, length, segment_ids=ids, clock=Clock(read, 0 * read, 0 * read))
        return chunk_attention(*inputs, Pattern(chunk, attention), state=given, segments=segments)[0]

    leaves = [normal(2, 2, length, 16), normal(2, 2, length, 16, seed=1), normal(2, 2, length, value)]
    names = calls(monkeypatch, attention_file)
    with torch.autocast("cpu", torch.bfloat16):
        found = _evaluate(operator, leaves)
        again = on_two_threads(lambda: _evaluate(operator, leaves))
    for got, repeated, wanted in zip(found, again, _evaluate(operator, [x.double() for x in leaves]), strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, repeated)
        assert (got - wanted).norm(dim=-1).max() < 0.01 * wanted.norm(dim=-1).max()
    assert len(names) == 4


@needs_products
def test_kernels_are_taken(monkeypatch):
    names = [calls(monkeypatch, file) for file in (projections_file, feed_forward_file, loss_file)]
    x, weight = normal(20, 32).requires_grad_(), _weight(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        projections(x, (weight,), (None,))[0].sum().backward()
        feed_forward(x, weight, weight, weight, x).sum().backward()
        linear_cross_entropy(x, weight, torch.arange(20)).backward()
    assert [len(several) for several in names] == [2, 2, 1]


@needs_products
def test_a_step_takes_the_kernels_of_a_step_in_float32(monkeypatch):
    """Activations between kernels are float32, so that no operator uses its eager form."""
    model, text = gecko.Gecko(gecko.GeckoConfig.preset("tiny", num_layers=1)), cases.tokens(2, 200)

    def taken(rounds: bool) -> set[str]:
        monkeypatch.setattr(native, "_functions", {})
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            loss = model.loss(text[:, :-1], text[:, 1:])
        loss.backward()
        return set(native._functions)

    assert taken(rounds=True) == taken(rounds=False)


@needs_products
@pytest.mark.parametrize("widths", [(16, 32), (32, 48), (1024, 1024)])
def test_what_kernels_leave_out_is_float32_as_well(monkeypatch, widths):
    names = calls(monkeypatch, projections_file)
    layer = nn.Linear(*widths)
    with torch.autocast("cpu", torch.bfloat16):
        (bare,) = project(normal(20, widths[0]), layer)
        layer.register_forward_hook(lambda *_: None)
        (called,) = project(normal(20, widths[0]), layer)
    assert names == [] and bare.dtype == torch.float32 and torch.equal(bare, called)
    assert not torch.equal(bare, layer(normal(20, widths[0])))  # it was rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_processor_without_such_products_and_float16(monkeypatch, dtype):
    """Autocast is then PyTorch's."""
    if dtype == torch.bfloat16:
        monkeypatch.setattr(kernels, "_cpu_kernels_round", lambda: False)
    names = calls(monkeypatch, projections_file)
    with torch.autocast("cpu", dtype):
        assert linear_dtype(normal(1)) == dtype
        assert projections(normal(20, 32), (_weight(32, 32),), (None,))[0].dtype == dtype
    assert names == []


@needs_products
def test_gradients_are_nearer_to_exact_ones_than_those_of_autocast(monkeypatch):
    model, text = cases.model("gecko", torch.float32), cases.tokens(2, 100)

    def gradients(rounds: bool) -> Tensor:
        monkeypatch.setattr(kernels, "_cpu_kernels_round", lambda: rounds)
        return _flat(model, lambda: model.loss(text[:, :-1], text[:, 1:]))

    exact = _flat(model.double(), lambda: model.loss(text[:, :-1], text[:, 1:]))
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, autocast = gradients(True), gradients(False)
    assert (ours - exact).norm() < (autocast - exact).norm() < 0.1 * exact.norm()


def _flat(model: gecko.Gecko, loss: Callable[[], Tensor]) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in torch.autograd.grad(loss(), list(model.parameters()))])
