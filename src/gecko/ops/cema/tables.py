"""The tables of the matrix form, and their gradients in few passes: they cost the same for any number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gecko.ops.cema.coefficients import CEMACoefficients
from gecko.ops.dtypes import full_precision


def chunk_tables(coefficients: CEMACoefficients, chunk: int) -> tuple[Tensor, ...]:
    """What a chunk of C steps needs of D filters of N modes; modes are (real, imaginary) neighbours.

    Returns:
        response: (D, C), k[j] = Re Σ_n γ_n p_n q_n^j.
        into_state: (D, C, 2N), p q^(C−1−s) for step s.
        from_state: (D, C, 2N), the conjugate of γ q^(t+1) for step t: a product with it is the real part of the
            complex one.
        decay: (D, N), q^C, complex.
    """
    gamma = torch.view_as_complex(coefficients.output)
    with torch.no_grad():
        powers = coefficients.powers(chunk + 1).transpose(1, 2).contiguous()
    return _Tables.apply(coefficients.input, coefficients.decay(), gamma, powers)


def _pairs(x: Tensor) -> Tensor:
    """(D, C, N) complex to (D, C, 2N)."""
    return torch.view_as_real(x).flatten(-2)


def _complex(x: Tensor) -> Tensor:
    """(D, C, 2N) to (D, C, N) complex."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def _reversed(x: Tensor) -> Tensor:
    """The last step first; copies whole rows, which ``flip`` does not."""
    return x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device))


class _Tables(torch.autograd.Function):
    """(p, q, γ) to the tables; p (D, N) real, q and γ (D, N) complex. powers: q^0 … q^C, (D, C + 1, N)."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, gamma: Tensor, powers: Tensor) -> tuple[Tensor, ...]:
        chunk = powers.shape[1] - 1
        ctx.save_for_backward(p, gamma, powers)
        driven = p.unsqueeze(1) * powers[:, :chunk]
        conjugate = gamma.conj().resolve_conj()
        response = torch.bmm(_pairs(driven), torch.view_as_real(conjugate).flatten(1).unsqueeze(-1)).squeeze(-1)
        from_state = (gamma.unsqueeze(1) * powers[:, 1:]).conj().resolve_conj()
        return response, _pairs(_reversed(driven)), _pairs(from_state), powers[:, chunk].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_response: Tensor, grad_into: Tensor, grad_from: Tensor, grad_decay: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        p, gamma, powers = ctx.saved_tensors
        chunk = powers.shape[1] - 1
        conjugate, back = gamma.conj().resolve_conj(), powers.conj().resolve_conj()
        # Of a product a b, the gradient of a is that of the product times the conjugate of b.
        grad_driven = torch.addcmul(
            _reversed(_complex(grad_into)), conjugate.unsqueeze(1), grad_response.unsqueeze(-1).to(gamma.dtype)
        )
        read = _complex(grad_from).conj_physical_()  # the gradient of γ q^(t+1)
        # d q^j = j q^(j−1) dq.
        slopes = back[:, :chunk] * torch.arange(1, chunk + 1, device=p.device, dtype=p.dtype).unsqueeze(-1)
        driven_powers = (grad_driven * back[:, :chunk]).sum(1)
        grad_q = p * (slopes[:, :-1] * grad_driven[:, 1:]).sum(1) + conjugate * (slopes * read).sum(1)
        with full_precision(grad_response):  # of a caller who differentiates inside of it
            responses = torch.bmm(grad_response.unsqueeze(1), _pairs(powers[:, :chunk]))
        grad_gamma = (back[:, 1:] * read).sum(1) + p * _complex(responses).squeeze(1).conj()
        return driven_powers.real, grad_q + slopes[:, -1] * grad_decay, grad_gamma, None
