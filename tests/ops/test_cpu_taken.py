"""C kernels are not used where they would be wrong."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from support import cases
from support.native_agreement import needs_compiler, normal
from torch.autograd import forward_ad

import gecko
from gecko.layers import FeedForward
from gecko.ops.backends import dispatch as kernels
from gecko.ops.backends.dispatch import cpu_kernels_run_on
from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import silu_by_head
from gecko.ops.loss import linear_cross_entropy
from gecko.ops.norms import group_rms_norm
from gecko.ops.projections import projections
from gecko.ops.timestep_norm import Statistics, timestep_norm

pytestmark = needs_compiler


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_operator_is_recorded() -> None:
    x = normal(2, 70, 8, seed=9)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: silu_by_head(x, 2), normal(2, 70, 8), check_trace=False)
        torch.testing.assert_close(traced(x), silu_by_head(x, 2))


def test_functions_of_torch_func_and_forward_differentiation_see_operations() -> None:
    seen = []
    torch.func.vmap(lambda x: seen.append(cpu_kernels_run_on(x)) or x)(torch.zeros(2, 3))
    with forward_ad.dual_level():
        seen.append(cpu_kernels_run_on(torch.zeros(2)))
        dual = forward_ad.make_dual(normal(2**18), normal(2**18, seed=1))
        assert forward_ad.unpack_dual(swiglu(dual, dual)).tangent is not None
    assert seen == [False, False]
    assert cpu_kernels_run_on(torch.zeros(2))


@pytest.mark.parametrize("eps", [0, 1])
def test_a_whole_number_is_as_good_as_another(eps: int) -> None:
    x = normal(2, 70, 32)
    torch.testing.assert_close(group_rms_norm(x, None, 2, eps), group_rms_norm(x, None, 2, float(eps)))
    norms = (timestep_norm(x, None, None, Statistics(4, (0.9, 0.99), number))[0] for number in (eps, float(eps)))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_skip_connection_of_another_dtype(dtype: torch.dtype) -> None:
    x, skip = normal(2, 70, 5), torch.arange(5.0)
    drawn = cases.CEMA.draw_parameters(torch.Generator().manual_seed(1))
    coefficients = CEMACoefficients.from_parameters(*(parameter.float() for parameter in drawn))
    found, expected = (cema(x, coefficients, skip=number)[0] for number in (skip.to(dtype), skip))
    torch.testing.assert_close(found, expected)


def test_negative_views_are_read_as_they_are() -> None:
    x = normal(2, 70, 8)
    torch.testing.assert_close(silu_by_head(torch._neg_view(x), 2), silu_by_head(-x, 2))


def test_states_of_inference_mode_go_on_with_gradients() -> None:
    model = gecko.Gecko(replace(gecko.GeckoConfig.preset("tiny"), num_layers=1))
    tokens = torch.randint(256, (1, 100))
    with torch.inference_mode():
        _, state = model(tokens)
    logits, _ = model(tokens, state=state)
    logits.sum().backward()


def test_attention_of_large_scores_is_as_exact_as_the_eager_form(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, weights = (normal(1, 2, 100, 16, seed=i) for i in range(4))
    q, k = 10 * q, 10 * k

    def error() -> float:
        gradients = []
        for dtype in (torch.float32, torch.float64):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out, _ = chunk_attention(*leaves, Pattern(32))
            gradients.append(torch.autograd.grad(out, leaves, weights.to(dtype)))
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True))

    native = error()
    monkeypatch.setattr("gecko.ops.backends.dispatch._cpu_kernels_installed", lambda: False)
    assert native < 2 * error()


def test_a_copy_takes_no_kernels_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported code may find any version of gecko installed; the installed classes are not those of the export."""
    spec = importlib.util.spec_from_file_location("gecko_ops_kernels", kernels.__file__)
    assert spec is not None and spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copied)
    spec.loader.exec_module(copied)
    assert not copied.cpu_kernels_run_on(torch.zeros(2))
    assert not copied.triton_kernels_installed()


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
def test_a_compiler_sees_operations(rounded: bool) -> None:
    """Trace layers, and a head with its loss, that are large enough for the kernels to be used otherwise."""
    layer = FeedForward(gecko.GeckoConfig.preset("tiny"), 0)
    x, head = normal(2000, 128), normal(48, 128).requires_grad_()
    targets = torch.arange(2000) % 48

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (y,) = projections(layer(x, x), (head,), (None,))
        return y, linear_cross_entropy(x, head, targets)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        for found, wanted in zip(compiled(x), both(x), strict=True):
            tolerance = 0.05 * float(wanted.detach().abs().max()) if rounded else 1e-4
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, check_dtype=False)
