"""Comparison of kernels with eager forms: outputs and gradients; and checks of registered custom operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from support import laws
from support.cases import VARIANTS, Case
from torch import Tensor

from gecko import Gecko, GeckoConfig

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference, relative to the largest number of the tensor; 16-bit formats round the output once."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal random numbers that require gradients."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def agree(kernels: Callable[..., Tensor], eager: Callable[..., Tensor], leaves: Sequence[Tensor | None]) -> None:
    """Assert that ``kernels`` in the leaves' dtypes equal ``eager`` in float64: the output and every gradient."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    output, exact = kernels(*leaves), eager(*wide)
    assert output.shape == exact.shape
    _same("output", output, exact)
    weights = normal(*exact.shape, seed=1).detach().to(output.dtype)
    gradients = _gradients(output, leaves, weights)
    for i, (got, wanted) in enumerate(zip(gradients, _gradients(exact, wide, weights.double()), strict=True)):
        _same(f"gradient {i}", got, wanted)


def _gradients(output: Tensor, leaves: Sequence[Tensor | None], weights: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, [x for x in leaves if x is not None], weights)


def _same(name: str, got: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(
        got.double(), wanted, rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{name}: {text}"
    )


SMALL = GeckoConfig(
    vocab_size=32, num_layers=1, model_dim=16, key_dim=16, value_dim=32, num_heads=1, ffn_dim=16, chunk_size=8,
    cema_modes=2, timestep_groups=2,
)  # fmt: skip


def small_model(variant: str, **changes: object) -> Gecko:
    """Return a model that a simulator of a GPU computes in seconds."""
    torch.manual_seed(0)
    return Gecko(replace(SMALL, **VARIANTS[variant], **changes))


def in_float32(*cases: Case) -> list[Case]:
    return [replace(case, dtype=torch.float32) for case in cases]


def laws_over(cases: Sequence[Case], parted: Collection[str]) -> list[Any]:
    """Return the laws over the cases; of those that also cut at every place, which takes longest, only ``parted``."""
    return [x for x in laws.over(cases) if x.values[0] is not laws.split_anywhere or str(x.values[1]) in parted]


def distance(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((got.double() - wanted).detach().abs().max() / wanted.detach().abs().max())


def is_well_registered(operator: Any, *inputs: Any) -> None:
    """Check a custom operator's schema, fake implementation and autograd, and that it breaks no compiled graph."""
    torch.library.opcheck(operator.registered, inputs)

    def around(*inputs: Any) -> Any:
        first, *rest = inputs
        return operator(2 * first, *rest)

    # Dynamo counts recompilations of `around` over all operators of a process, and gives up after eight.
    torch._dynamo.reset()
    found, expected = torch.compile(around, backend="aot_eager", fullgraph=True)(*inputs), around(*inputs)
    torch.testing.assert_close(found, expected)
