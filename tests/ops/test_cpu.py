"""The C kernels satisfy the laws, and equal their eager forms in float64 at any size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support import cases, laws
from support.native_agreement import Form, agree, evaluate, needs_compiler, normal, on_two_threads, turned
from torch import Tensor

from gecko.ops import loss as loss_file
from gecko.ops.backends import cpu as native
from gecko.ops.feed_forward import SwiGLUCPU, feed_forward, swiglu
from gecko.ops.gates import gated, silu_by_head
from gecko.ops.loss import IGNORED, linear_cross_entropy, token_cross_entropy
from gecko.ops.norms import group_layer_norm, group_rms_norm
from gecko.ops.projections import projections
from gecko.ops.qk_scale_shift import qk_scale_shift

pytestmark = needs_compiler
EPS = 1e-3


@pytest.mark.parametrize(
    ("operator", "law", "case"),
    [
        pytest.param(operator, *x.values, id=f"{operator}-{x.id}")
        for operator in cases.WIDE
        for x in laws.over(cases.SINGLE if operator in cases.FIRST else cases.SINGLE_OF_OTHERS)
    ],
)
def test_native(operator, law, case):
    law(operator, case)


@pytest.mark.parametrize("operator", cases.WIDE, ids=str)
def test_the_number_of_threads_changes_no_bit(operator):
    given = cases.problem(operator, cases.Case(300, "packed", (40,), batch=3, dtype=torch.float32))
    one, two = laws.read(operator.fast, given), on_two_threads(lambda: laws.read(operator.fast, given))
    for found, expected in ((two.values, one.values), (two.gradients, one.gradients)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- Operators of one step, at sizes around the 16 lanes of a register and the tiles and tasks of their kernels.


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels with packed weights for few tokens."""
    monkeypatch.setattr(native, "_FEWEST_TOKENS", 1)


def _leaves(*shapes: tuple[int, ...] | None) -> list[Tensor | None]:
    return [None if shape is None else normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def _weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return normal(outputs, inputs, seed=seed) / inputs**0.5


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Call the kernel, also for few numbers."""
    return SwiGLUCPU.run(a, b) if a.dtype == torch.float32 else swiglu(a, b)


def _rms(groups: int, x: Tensor, weight: Tensor | None) -> Tensor:
    return group_rms_norm(x, weight, groups, EPS)


def _layer(groups: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return group_layer_norm(x, weight, bias, groups, EPS)


def _rows(heads: int, z: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
    return qk_scale_shift(z, scale, offset, heads, EPS)


def _layers(x: Tensor, onto: Tensor | None, *layers: Tensor | None) -> tuple[Tensor, ...]:
    """Project by weights, of which as many biases follow."""
    weights = [t for t in layers[: len(layers) // 2] if t is not None]
    return projections(x, weights, layers[len(layers) // 2 :], onto)


TOKENS = [1, 96, 97, 1000]
"""Numbers of tokens around a block, and numbers of blocks that do not divide evenly among groups."""
WIDTHS = [(16, 16), (48, 80), (64, 256), (144, 32), (272, 112)]
"""(inputs, outputs): packed weights of every width, and depths beyond one panel."""
NORMS = [
    ((2, 3), 1, 1), ((1, 15), 1, 15), ((17,), 1, 17), ((3, 7), 4, 32), ((3, 11), 5, 40), ((2, 9), 16, 3),
    ((2, 9), 17, 16), ((5, 5, 5), 35, 8), ((70, 37), 2, 24), ((1025,), 3, 16), ((2, 5), 1, 1000),
]  # fmt: skip
"""Shape of the steps, number of groups, and width of a group."""


def _agreements() -> Iterator[tuple[str, Form, list[Tensor | None]]]:
    """Yield operators with inputs of many sizes."""
    for b, h, t, d in ((1, 1, 1, 1), (2, 3, 5, 4), (3, 2, 7, 16), (1, 4, 9, 33), (2, 2, 300, 47)):
        yield f"silu-{b, h, t, d}", partial(silu_by_head, heads=h), _leaves((b, t, h * d))
        for recalled in ((b, h, t, d), None):
            yield f"gated-{b, h, t, d}-{recalled}", gated, _leaves((b, h, t, d), (b, t, h * d), recalled)
    for shape in ((1,), (16,), (3, 5, 17), (2, 130, 127)):
        yield f"swiglu-{shape}", _swiglu, _leaves(shape, shape)
    for steps, groups, width in NORMS:
        features = (groups * width,)
        for affine in (features, None):
            x = 2 + normal(*steps, *features, seed=5)
            yield f"rms-{steps, groups, width}-{affine}", partial(_rms, groups), [x, *_leaves(affine)]
            if groups > 1:  # all features are PyTorch's
                yield f"layer-{steps, groups, width}-{affine}", partial(_layer, groups), [x, *_leaves(affine, affine)]
    for batch, length in ((1, 1), (2, 63), (5, 26), (3, 150), (1, 4097)):  # tiles of 64 tokens may span rows
        for heads, size, rows in ((1, 1, 4), (2, 6, 4), (3, 16, 2), (1, 33, 3), (2, 48, 1)):
            shapes = (batch, length, heads * size), (rows, heads * size), (rows, heads * size)
            yield f"qk-{batch, length}-{heads, size, rows}", partial(_rows, heads), _leaves(*shapes)


def _agreements_of_layers() -> Iterator[tuple[str, Form, list[Tensor | None]]]:
    for tokens in TOKENS:
        for inputs, outputs in WIDTHS:
            one = [normal(tokens, inputs), None, _weight(outputs, inputs), None]
            yield f"layer-of-{tokens}-{inputs}x{outputs}", _layers, one
            weights = [_weight(outputs, inputs), _weight(outputs, inputs, 1), _weight(inputs, outputs, 2)]
            x, onto = _leaves((2, tokens, inputs), (2, tokens, inputs))
            yield f"feed-forward-of-{tokens}-{inputs}x{outputs}", feed_forward, [x, *weights, onto]
        for onto, biased in (((2, tokens, 48), (32, 80, 48)), (None, (None, 80, None))):
            weights = [_weight(size, 64, i) for i, size in enumerate((32, 80, 48))]
            biases = _leaves(*(None if size is None else (size,) for size in biased))
            yield f"layers-of-{tokens}-{onto}", _layers, [*_leaves((2, tokens, 64), onto), *weights, *biases]


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(
    ("operator", "leaves"), [pytest.param(*x, id=name) for name, *x in (*_agreements(), *_agreements_of_layers())]
)
def test_kernels_agree_with_the_eager_form(operator, leaves):
    agree(operator, leaves)


X, HEADS = (2, 5, 32), (2, 2, 5, 16)
SOME: dict[str, tuple[Form, list[Tensor]]] = {
    "gates_silu": (partial(silu_by_head, heads=2), _leaves(X)), "gates_gated": (gated, _leaves(HEADS, X, HEADS)),
    "swiglu": (_swiglu, _leaves(X, X)), "norms": (partial(_layer, 2), _leaves(X, (32,), (32,))),
    "qk_scale_shift": (partial(_rows, 2), _leaves(X, (4, 32), (4, 32))),
    "projections": (_layers, _leaves(X, X, (32, 32), (48, 32), (32, 32), (32,), (48,), (32,))),
    "feed_forward": (feed_forward, [normal(*X), *(_weight(32, 32, i) for i in range(3)), normal(*X, seed=1)]),
}  # fmt: skip
"""By the beginning of the names of their kernels."""
some = pytest.mark.parametrize("name", SOME)


@pytest.mark.usefixtures("few_tokens")
@some
def test_any_strides(name):
    operator, leaves = SOME[name]
    agree(operator, [turned(x) for x in leaves], turned)


def _taken(operator: Form, leaves: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the kernels that run forward and backward."""
    monkeypatch.setattr(native, "_functions", {})
    evaluate(operator, leaves, Tensor.contiguous)
    return set(native._functions)


@pytest.mark.usefixtures("few_tokens")
@some
def test_float32_takes_the_kernels(name, monkeypatch):
    operator, leaves = SOME[name]
    assert _taken(operator, leaves, monkeypatch) == {f"{name}_forward", f"{name}_backward"}
    assert _taken(operator, [x.double() for x in leaves], monkeypatch) == set()


def test_what_the_kernels_leave_out(monkeypatch):
    """Few numbers, other dtypes of results, widths that fill no register, many weights, and few tokens."""
    x = normal(20, 32)
    assert _taken(swiglu, [normal(2**17 + 1)] * 2, monkeypatch) == {"swiglu_forward", "swiglu_backward"}
    assert _taken(swiglu, [normal(2**17)] * 2, monkeypatch) == set()
    assert _taken(lambda x: group_rms_norm(x, None, 1, EPS, torch.bfloat16), [x], monkeypatch) == set()
    assert _taken(lambda x: group_rms_norm(x, None, 1, EPS, torch.float32), [x.bfloat16()], monkeypatch) == set()
    monkeypatch.setattr(native, "_FEWEST_TOKENS", 1)
    for inputs, outputs in ((24, 32), (32, 40), (1024, 1024)):
        given = [normal(20, inputs), _weight(outputs, inputs)]
        assert _taken(lambda x, w: _layers(x, None, w, None), given, monkeypatch) == set()
    monkeypatch.setattr(native, "_FEWEST_TOKENS", 21)
    assert _taken(lambda x, w: _layers(x, None, w, None), [x, _weight(32, 32)], monkeypatch) == set()


@pytest.mark.usefixtures("few_tokens")
@some
def test_only_what_is_asked_for(name):
    """The gradient of each input alone, and with some outputs that nobody uses."""
    operator, leaves = SOME[name]

    def gradients(given: list[Tensor], used: int, wanted: list[int]) -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(given)]
        outputs = operator(*given)
        y = outputs if isinstance(outputs, Tensor) else outputs[used]
        weights, leaves = normal(*y.shape).to(y.dtype), [given[i] for i in wanted]
        if not y.requires_grad:
            return tuple(map(torch.zeros_like, leaves))
        return torch.autograd.grad(y, leaves, weights, allow_unused=True, materialize_grads=True)

    everything = list(range(len(leaves)))
    for used in range({"projections": 3, "qk_scale_shift": 4}.get(name, 1)):
        exact = gradients([x.double() for x in leaves], used, everything)
        for place, wanted in enumerate(exact):
            (got,) = gradients(leaves, used, [place])
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@pytest.mark.usefixtures("few_tokens")
def test_no_gradient_comes_of_none():
    x = normal(300, 32).requires_grad_()
    _Stop.apply(_layers(x, None, _weight(48, 32), None)[0]).sum().backward()
    assert x.grad is None


@pytest.mark.usefixtures("few_tokens")
def test_what_frozen_layers_read_is_not_kept():
    x, weight = normal(300, 32).requires_grad_(), _weight(48, 32)
    read = x * 1
    (y,) = _layers(read, None, weight, None)
    read.zero_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, weight.sum(0).expand(300, 32))


@pytest.mark.parametrize("change", [torch._neg_view, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)])
def test_gradients_may_come_in_any_layout(change):
    x, grad = normal(2, 5, 8).requires_grad_(), normal(2, 5, 8, seed=1)
    for y in (silu_by_head(x, 2), swiglu(x, x)):
        given = grad.reshape(y.shape)
        (got,), (wanted,) = (torch.autograd.grad(y, x, each, retain_graph=True) for each in (change(given), given))
        torch.testing.assert_close(got, -wanted if change is torch._neg_view else wanted)


@pytest.mark.usefixtures("few_tokens")
def test_second_derivatives_are_refused():
    x, weight, targets = normal(300, 32).requires_grad_(), _weight(32, 32).requires_grad_(), torch.arange(300) % 32
    loss = linear_cross_entropy(x, weight, targets)
    for y in (*_layers(x, None, weight, None), feed_forward(x, weight, weight, weight, x), loss):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(
    "change", [Tensor.bfloat16, Tensor.double, lambda t: t.to("meta"), lambda t: t[:1], lambda t: t.expand(2, *t.shape)]
)
def test_saved_tensors_that_come_back_as_others_are_refused(change):
    x = normal(300, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(change, lambda t: t):
        (y,) = _layers(x, None, _weight(48, 32).requires_grad_(), None)
    with pytest.raises(ValueError, match=r"C kernels need|a hook on saved tensors must"):
        y.sum().backward()


@pytest.mark.usefixtures("few_tokens")
def test_saved_tensors_may_come_back_in_another_order_of_memory():
    x, weight = normal(300, 32).requires_grad_(), _weight(48, 32).requires_grad_()
    expected = torch.autograd.grad(_layers(x, None, weight, None)[0].sum(), (x, weight))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous().mT, lambda t: t):
        (y,) = _layers(x, None, weight, None)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), expected))


def test_large_numbers_and_none():
    """Gates that are closed, fully open, and NaN."""
    x = torch.tensor([[[-3e38, -1e4, -90.0, -88.5, -87.0, -20.0, 0.0, 20.0, 87.0, 88.5, 90.0, 3e38]]])
    for operator in (lambda x: silu_by_head(x, 2), lambda x: _swiglu(x, torch.ones_like(x))):
        found, exact = (evaluate(operator, [given], torch.ones_like) for given in (x, x.double()))
        for got, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-34)
    assert silu_by_head(torch.full((1, 1, 20), float("nan")), 2).isnan().all()


def test_no_tokens():
    x, scale = torch.zeros(2, 0, 12, requires_grad=True), torch.zeros(4, 12, requires_grad=True)
    rows = qk_scale_shift(x, scale, scale, 3, EPS)
    y = gated(silu_by_head(x, 3), x, rows[0])
    assert y.shape == (2, 0, 12) and [row.shape for row in rows] == [(2, 3, 0, 4)] * 4
    grad_x, grad_scale = torch.autograd.grad(y.sum(), (x, scale))
    assert grad_x.shape == x.shape and not grad_scale.any()


def test_sums_over_many_tokens_keep_their_digits():
    """All gradients are one. Float32 sums in sequence would lose digits that the eager form keeps."""
    given = [x.requires_grad_() for x in _leaves((1, 2**16, 1), (2, 1), (2, 1))]
    row = qk_scale_shift(*given, 1, EPS)[0]
    (offset,) = torch.autograd.grad(row, given[2], torch.full_like(row, 0.1))
    assert abs(offset[0].item() / (0.1 * 2**16) - 1) < 1e-6


# ---- The loss, of heads whose logits fit in the cache and of others.

LOGITS = [(1, 8, 1), (3, 8, 7), (5, 8, 16), (20, 8, 33), (300, 8, 264), (7, 8, 5000)]
"""(tokens, features, vocabulary) around 16 lanes; the last two are divided among threads."""
FITS = [(1, 16, 1), (96, 48, 33), (97, 16, 264), (1000, 80, 500)]
"""The same of heads whose logits fit in the cache, around a block of tokens."""


def _loss(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets, z_loss=z_loss)
    return loss.detach(), *torch.autograd.grad(3 * loss, leaves)


def _agree(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> None:
    found, exact = (_loss(*x, targets, z_loss) for x in ((hidden, weight), (hidden.double(), weight.double())))
    again = on_two_threads(lambda: _loss(hidden, weight, targets, z_loss))
    assert z_loss or torch.equal(found[0], again[0])
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * max(1e-3, float(wanted.abs().max())))


def _targets(tokens: int, vocabulary: int, ignored: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return targets.masked_fill(torch.rand(tokens, generator=generator) < ignored, IGNORED)


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(("ignored", "z_loss"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.0), (0.4, 0.01)])
@pytest.mark.parametrize("size", [*LOGITS, *FITS], ids=str)
def test_loss(size, ignored, z_loss, monkeypatch):
    monkeypatch.setattr(native, "_functions", {})
    tokens, features, vocabulary = size
    weight = _weight(vocabulary, features) if size in FITS else normal(vocabulary, features)
    _agree(normal(tokens, features), weight, _targets(tokens, vocabulary, ignored), z_loss)
    assert set(native._functions) == {"loss_of_head" if size in FITS and not z_loss else "loss_and_gradient"}


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize("frozen", [0, 1])
def test_head_with_one_side_frozen(frozen):
    leaves, targets = _leaves((100, 16), (40, 16)), _targets(100, 40)
    trained = leaves[1 - frozen].requires_grad_()
    (found,) = torch.autograd.grad(linear_cross_entropy(*leaves, targets), trained)
    (exact,) = torch.autograd.grad(linear_cross_entropy(*(x.double() for x in leaves), targets), trained)
    torch.testing.assert_close(found, exact.float())


def test_large_logits():
    """Logits of either sign, so far apart that the largest one is the whole sum."""
    for scale in (1e3, -1e3, 1e30, -1e30):
        _agree(scale * normal(9, 8), normal(33, 8), _targets(9, 33))


@pytest.mark.parametrize("place", [0, 15, 32])
def test_none_stays_none(place):
    """A NaN or an infinity in the logits of one row affects only the loss and the gradient of that row."""
    for value in (float("nan"), float("inf")):
        logits = normal(3, 33)
        logits[1, place] = value
        losses, grad = loss_file.losses_and_gradient_cpu(logits, torch.tensor([1, 2, 3]), 3.0)
        assert losses.isfinite().tolist() == grad.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("fewest", [1, 1536], ids=["head", "logits"])
def test_targets_and_weights_that_do_not_fit_are_refused(monkeypatch, fewest):
    monkeypatch.setattr(native, "_FEWEST_TOKENS", fewest)
    hidden, weight = normal(5, 16).requires_grad_(), normal(7, 16)
    for wrong in (-1, 7, 2_000_000_000):
        targets = torch.tensor([1, 2, wrong, 3, IGNORED])
        with pytest.raises(IndexError, match=rf"in 0\.\.6, or -100; got {wrong}"):
            linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(TypeError, match=r"targets must be int64; got torch\.int32"):
        linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"targets must have shape \(5,\); got \(4,\)"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64))
    for loss in (linear_cross_entropy, token_cross_entropy):
        for features in (8, 32):
            with pytest.raises(ValueError, match=rf"weight must have shape \(40, 16\); got \(40, {features}\)"):
                loss(hidden, normal(40, features), torch.zeros(5, dtype=torch.int64))
