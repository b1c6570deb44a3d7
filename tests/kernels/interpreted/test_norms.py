"""The kernels of group RMS norm and group layer norm equal their eager forms."""

from __future__ import annotations

import pytest
import torch
from kernels.agreement import agree, is_well_registered, normal

from gecko.ops.norms import group_layer_norm, group_rms_norm, norm_of_sum
from gecko.ops.norms import triton as kernels

EPS = 1e-3
F32, BF16 = torch.float32, torch.bfloat16


pytestmark = pytest.mark.usefixtures("on_kernels")


def _compare(leaves, groups, centered, dtype, laid=lambda x: x):
    """Compare the kernels' norm of ``laid(x)`` with the eager form; the leaves are x, weight and bias."""
    eager = group_layer_norm if centered else lambda x, weight, _, *fixed: group_rms_norm(x, weight, *fixed)
    agree(
        lambda x, weight, bias: kernels.group_norm(laid(x), weight, bias, groups, EPS, centered, dtype),
        lambda x, weight, bias: eager(laid(x), weight, bias, groups, EPS),
        leaves,
    )


@pytest.mark.parametrize(
    ("shape", "groups", "affine", "dtype"),
    [((2, 5, 12), 3, True, F32), ((7, 10), 1, False, BF16), ((1, 33), 1, True, BF16), ((40, 3, 8), 4, False, F32)],
)
@pytest.mark.parametrize("centered", [True, False])
def test_group_norm(shape, groups, affine, dtype, centered, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    x, weight, bias = normal(*shape, dtype=dtype), *((normal(shape[-1], seed=s) if affine else None) for s in (1, 2))
    _compare((x, weight, bias if centered else None), groups, centered, dtype)


def test_group_norm_of_steps_that_fill_no_tile_walks_over_all(monkeypatch):
    """Many steps for few programs: each program takes several tiles, and the last tile is partial."""
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    sizes = kernels._sizes
    monkeypatch.setattr(kernels, "_sizes", lambda *shape: {**sizes(*shape), "steps": 2})
    _compare((normal(13, 6), normal(6), None), 2, False, F32)


def test_group_norm_gives_the_dtype_asked_for_and_the_gradient_that_of_x():
    x, weight = normal(6, 16), normal(16)
    assert kernels.group_norm(x, weight, None, 1, EPS, False, BF16).dtype == BF16
    _compare((x, weight, None), 1, False, BF16)


def test_group_norm_reads_tensors_that_are_not_contiguous():
    _compare((normal(5, 3, 8), None, None), 2, True, F32, laid=lambda x: x.transpose(0, 1))


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("kept", "branch", "branches"), [(F32, F32, 1), (F32, BF16, 2), (BF16, BF16, 1)])
def test_group_norm_of_a_sum(kept, branch, branches, centered, monkeypatch):
    """The norm and the sum are one output, so both have gradients."""
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    groups, dtype = 3, branch
    terms = [normal(2, 5, 12, dtype=kept), *(normal(2, 5, 12, seed=s, dtype=branch) for s in range(4, 4 + branches))]
    weight, bias = normal(12, seed=1, dtype=kept), normal(12, seed=2, dtype=kept) if centered else None

    def kernel(weight, bias, *terms):
        y, total = kernels.group_norm_of_sum(terms[0], terms[1:], weight, bias, groups, EPS, centered, dtype)
        assert (y.dtype, total.dtype) == (dtype, kept)
        grads = torch.autograd.grad((y, total), terms, (y, total), retain_graph=True)
        assert [x.dtype for x in grads] == [x.dtype for x in terms]
        return torch.cat([y, total.to(dtype)])

    def eager(weight, bias, *terms):
        return torch.cat(norm_of_sum(terms, weight, bias, groups, EPS, centered, torch.float64))

    agree(kernel, eager, (weight, bias, *terms))


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_of_a_sum_may_have_no_gradient(used):
    weight = normal(12).detach()
    agree(
        lambda x, branch: kernels.group_norm_of_sum(x, [branch], weight, None, 1, EPS, False, F32)[used],
        lambda *terms: norm_of_sum(terms, weight.double(), None, 1, EPS, False)[used],
        (normal(2, 12), normal(2, 12, seed=1)),
    )


class Stop(torch.autograd.Function):
    """The identity, which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_what_follows_a_norm_may_stop_gradients(is_on_gpu, monkeypatch):
    if not is_on_gpu:
        monkeypatch.undo()
    x, weight = normal(2, 3, 8), torch.ones(8)
    for out in (group_rms_norm(x, None, 1, 1e-5, F32), _sum_of((x, 2 * x, 3 * x), weight)[0]):
        (Stop.apply(out).sum() + x.sum()).backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        x.grad = None


def _sum_of(terms, weight, groups=1):
    return torch.cat(norm_of_sum(terms, weight, None, groups, EPS, False))


def test_a_sum_has_any_number_of_terms_and_the_widest_dtype():
    dtypes = BF16, torch.float16, F32, BF16
    for count in range(1, 5):
        terms = [normal(5, 12, seed=i, dtype=dtype) for i, dtype in enumerate(dtypes[-count:])]
        y, total = norm_of_sum(terms, None, None, 1, EPS, False)
        assert y.dtype == total.dtype == sum(terms).dtype
        exact = sum(term.detach().double() for term in terms)
        torch.testing.assert_close(total.double(), exact, rtol=1e-2, atol=1e-2)
        found = torch.autograd.grad(y.float().square().sum() + total.float().sum(), terms)
        assert [grad.dtype for grad in found] == [term.dtype for term in terms]


@pytest.mark.parametrize("place", [1, 2])
def test_terms_of_another_shape_are_refused_before_a_kernel_reads_them(place):
    terms = [normal(4, 12) for _ in range(3)]
    for shape in ((12,), (1, 12), (4, 1), (2, 4, 12), (3, 12)):
        terms[place] = normal(*shape)
        with pytest.raises(ValueError, match="every term must have shape"):
            _sum_of(terms, None)


def test_an_affine_part_or_groups_that_do_not_fit_are_refused():
    terms = [normal(4, 12), normal(4, 12)]
    with pytest.raises(ValueError, match="weight must have shape"):
        _sum_of(terms, normal(11))
    with pytest.raises(ValueError, match="both be given"):
        norm_of_sum(terms, normal(12), None, 1, EPS, True)
    for norm in (lambda: _sum_of(terms, None, groups=5), lambda: group_rms_norm(terms[0], None, 5, EPS)):
        with pytest.raises(RuntimeError, match="unflatten"):
            norm()


def test_terms_in_64_bits_or_without_gradients_are_added_as_pytorch_adds_them():
    x, frozen = normal(4, 12), normal(4, 12, seed=1).detach()
    y, total = norm_of_sum((x, frozen.double()), None, None, 1, EPS, False)
    assert y.dtype == total.dtype == torch.float64
    y, total = norm_of_sum((frozen, x), normal(12).detach(), None, 1, EPS, False)
    (y.sum() + total.sum()).backward()
    assert x.grad is not None
    total.data.zero_()
    assert bool(frozen.any())


@pytest.mark.parametrize("centered", [True, False])
def test_group_norm_is_well_registered(centered):
    bias = normal(8) if centered else None
    branches = [normal(3, 8, seed=seed, dtype=BF16) for seed in (1, 2)]
    for first, second in ((None, None), (branches[0], None), branches):
        given = normal(3, 8), first, second, normal(8), bias, 2, EPS, centered, BF16
        is_well_registered(kernels._group_norm, *given, None if first is None else F32)
