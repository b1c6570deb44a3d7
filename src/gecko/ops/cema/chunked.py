"""Coefficients of CEMA, and its eager form by products: a Toeplitz matrix in a chunk, an N-mode state across chunks.

With impulse response k[j] = Re Σ_n γ_n p_n q_n^j, a chunk of C steps is
    y = T x + W h,    h' = q^C h + G x
with T[t, s] = k[t − s], G[n, s] = p_n q_n^(C−1−s) and W[t, n] = γ_n q_n^(t+1). For each channel the chunks of all rows
and documents are one product; only h is passed from chunk to chunk. The cost of the tables T, W and G does not depend
on the number of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.dispatch import choose_backend
from gecko.ops.backends.first_order import FirstOrder
from gecko.ops.common import compute_dtype, full_precision
from gecko.ops.scan import ChunkStates, ScanPlan
from gecko.segments import Segments


@dataclass(frozen=True)
class CEMACoefficients:
    """Coefficients of one complex filter with N modes per channel; float32 or wider.

    input: p = σ(α), shape (D, N).
    log_damping: log |q| = log(1 − σ(α) σ(δ)), shape (D, N).
    angle: arg q, shape (D, N), radians.
    output: γ as (real, imaginary) pairs, shape (D, N, 2).
    """

    input: Tensor
    log_damping: Tensor
    angle: Tensor
    output: Tensor

    @classmethod
    def from_parameters(cls, alpha: Tensor, delta: Tensor, theta: Tensor, gamma: Tensor) -> CEMACoefficients:
        """Compute p = σ(α), |q| = 1 − σ(α) σ(δ), arg q = k · (2π/N) · σ(θ) for k = 1..N.

        Args:
            alpha, delta: (D, N); theta: (D,); gamma: (D, N, 2). Any float dtype; filters with a long memory (q close
                to 1) need parameters in float32.
        """
        # In training these are twenty launches of a layer. Weights are packed for decoding once, on any device.
        fits = torch.is_grad_enabled() and alpha.shape == delta.shape and theta.shape == alpha.shape[:1]
        if fits and all(choose_backend(x, cpu=False) == "triton" for x in (alpha, delta, theta)):
            from gecko.ops.cema.triton_coefficients import coefficients_triton

            p, log_damping, angle = coefficients_triton(alpha, delta, theta)
            return cls(p, log_damping, angle, gamma.to(compute_dtype(gamma)))
        alpha, delta, theta, gamma = (x.to(compute_dtype(x)) for x in (alpha, delta, theta, gamma))
        modes = torch.arange(1, alpha.shape[1] + 1, device=alpha.device, dtype=alpha.dtype)
        p = alpha.sigmoid()
        angle = (2 * math.pi / alpha.shape[1]) * theta.sigmoid().unsqueeze(1) * modes
        return cls(p, torch.log1p(-p * delta.sigmoid()), angle, gamma)

    def decay(self, steps: int | Tensor = 1) -> Tensor:
        """Return q^steps, complex. ``steps`` broadcasts against (D, N)."""
        return torch.polar(torch.exp(self.log_damping * steps), self.angle * steps)

    @cached_property
    def factor(self) -> Tensor:
        """q, complex (D, N): the factor of the state per step."""
        return self.decay()

    @cached_property
    def readout(self) -> Tensor:
        """(D, 2N): its product with interleaved (real, imaginary) states is Re Σ γ h."""
        return torch.view_as_real(torch.view_as_complex(self.output).conj().resolve_conj()).flatten(1)

    def powers(self, count: int) -> Tensor:
        """Return q^0 … q^(count − 1) as (D, N, count), computed by doubling: the rounding error grows with log(count),
        not with count as in exp(i · count · arg q)."""
        q = self.factor
        table, square = torch.ones_like(q).unsqueeze(-1), q.unsqueeze(-1)
        while table.shape[-1] < count:
            table = torch.cat([table, table * square], dim=-1)
            square = square * square
        return table[..., :count]


def chunk_tables(coefficients: CEMACoefficients, chunk: int) -> tuple[Tensor, ...]:
    """Compute the tables of a chunk of C steps for D filters of N modes, with interleaved (real, imaginary) numbers.

    Returns:
        response: (D, C), k[j] = Re Σ_n γ_n p_n q_n^j.
        into_state: (D, C, 2N), p q^(C−1−s) for step s.
        from_state: (D, C, 2N), the conjugate of γ q^(t+1) for step t. Its real product with h is Re(γ q^(t+1) h).
        decay: (D, N), q^C, complex.
    """
    gamma = torch.view_as_complex(coefficients.output)
    with torch.no_grad():
        powers = coefficients.powers(chunk + 1).transpose(1, 2).contiguous()
    return _TablesFunction.apply(coefficients.input, coefficients.decay(), gamma, powers)


def _pairs(x: Tensor) -> Tensor:
    """Convert (D, C, N) complex to (D, C, 2N) real, with interleaved real and imaginary parts."""
    return torch.view_as_real(x).flatten(-2)


def _complex(x: Tensor) -> Tensor:
    """Convert (D, C, 2N) to (D, C, N) complex."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def _reversed(x: Tensor) -> Tensor:
    """Reverse the steps. ``index_select`` copies whole rows and is faster than ``flip``."""
    return x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device))


class _TablesFunction(FirstOrder):
    """Compute the tables from p (D, N) real, q and γ (D, N) complex, and powers q^0 … q^C, (D, C + 1, N)."""

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
    def backward(
        ctx: Any, grad_response: Tensor, grad_into: Tensor, grad_from: Tensor, grad_decay: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        p, gamma, powers = ctx.saved_tensors
        chunk = powers.shape[1] - 1
        conjugate, back = gamma.conj().resolve_conj(), powers.conj().resolve_conj()
        # The gradient of a in a b is the gradient of the product times the conjugate of b.
        grad_driven = torch.addcmul(
            _reversed(_complex(grad_into)), conjugate.unsqueeze(1), grad_response.unsqueeze(-1).to(gamma.dtype)
        )
        read = _complex(grad_from).conj_physical_()  # the gradient of γ q^(t+1)
        # d q^j = j q^(j−1) dq.
        slopes = back[:, :chunk] * torch.arange(1, chunk + 1, device=p.device, dtype=p.dtype).unsqueeze(-1)
        driven_powers = (grad_driven * back[:, :chunk]).sum(1)
        grad_q = p * (slopes[:, :-1] * grad_driven[:, 1:]).sum(1) + conjugate * (slopes * read).sum(1)
        with full_precision(grad_response):  # the backward pass may run inside the caller's autocast
            responses = torch.bmm(grad_response.unsqueeze(1), _pairs(powers[:, :chunk]))
        grad_gamma = (back[:, 1:] * read).sum(1) + p * _complex(responses).squeeze(1).conj()
        return driven_powers.real, grad_q + slopes[:, -1] * grad_decay, grad_gamma, None


def cema_chunked(
    x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments, skip: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``cema_reference`` and add ω x to y, where ω is ``skip`` (D,)."""
    plan = ScanPlan.of(segments)
    response, into_state, from_state, decay = chunk_tables(coefficients, plan.chunk)
    if skip is not None:  # added to the response at lag 0, it needs no extra pass over x
        response = torch.cat([response[:, :1] + skip.to(response.dtype).unsqueeze(1), response[:, 1:]], dim=1)

    folded = plan.fold(x)
    updates = torch.view_as_complex(torch.bmm(folded, into_state).unflatten(-1, (-1, 2)))
    initial = torch.view_as_complex(plan.initial(state).transpose(0, 1).contiguous())
    states = ChunkStates.apply(updates, decay, initial, plan)
    y = torch.bmm(folded, _Toeplitz.apply(response))
    y = y.baddbmm_(torch.view_as_real(states).flatten(-2), from_state.mT)
    return plan.unfold(y), _final_state(x, coefficients, states, into_state, segments)


def cema_step(x: Tensor, coefficients: CEMACoefficients, state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Compute one step of the recurrence, for x of shape (B, 1, D)."""
    if torch.compiler.is_exporting():
        return _real_step(x, coefficients, state)
    h = torch.view_as_complex(state)
    if segments.starts is not None:
        h = h * segments.continues.unsqueeze(-1)
    # p x is real, so only the real parts of h change; the output needs only the real part of γ h.
    h = torch.view_as_real(h * coefficients.factor)
    h[..., 0].addcmul_(coefficients.input, x[:, 0].unsqueeze(-1))
    y = (coefficients.readout * h.flatten(2)).sum(-1)
    return y.unsqueeze(1), h


def _real_step(x: Tensor, coefficients: CEMACoefficients, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``cema_step`` within a document without complex numbers, which ONNX does not have."""
    size, angle = coefficients.log_damping.exp(), coefficients.angle
    q_real, q_imag = size * angle.cos(), size * angle.sin()
    real, imag = state.unbind(-1)
    after_real = q_real * real - q_imag * imag + coefficients.input * x[:, 0].unsqueeze(-1)
    after_imag = q_real * imag + q_imag * real
    gamma_real, gamma_imag = coefficients.output.unbind(-1)
    y = (gamma_real * after_real - gamma_imag * after_imag).sum(-1)
    return y.unsqueeze(1), torch.stack([after_real, after_imag], dim=-1)


def _final_state(
    x: Tensor, coefficients: CEMACoefficients, states: Tensor, into_state: Tensor, segments: Segments
) -> Tensor:
    """Return the state after the last token of each row. Its last chunk may be short and is aligned to the end."""
    plan = ScanPlan.of(segments)
    added = torch.bmm(plan.tail(x).permute(2, 0, 1).contiguous(), into_state).unflatten(-1, (-1, 2)).transpose(0, 1)
    decay = coefficients.decay(plan.last_length.view(-1, 1, 1))
    carried = decay * states.index_select(1, plan.last_chunk).transpose(0, 1)
    return torch.view_as_real(carried) + added


class _Toeplitz(FirstOrder):
    """Expand (D, C) to transposed Toeplitz matrices (D, C, C): M[s, t] = k[t − s] for t ≥ s, else 0."""

    @staticmethod
    def forward(ctx: Any, response: Tensor) -> Tensor:
        channels, chunk = response.shape
        steps = torch.arange(chunk, device=response.device)
        lag = steps - steps.unsqueeze(1)
        padded = torch.cat([response, response.new_zeros(channels, 1)], dim=1)
        return padded.index_select(1, torch.where(lag >= 0, lag, chunk).flatten()).view(channels, chunk, chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        channels, chunk, _ = grad.shape
        # Reading the padded rows with a length of one more shifts row s by s, so that each lag becomes a column.
        flat = grad.new_empty(channels, chunk * (2 * chunk + 1))
        rows = flat[:, : 2 * chunk * chunk].unflatten(1, (chunk, 2 * chunk))
        rows[..., :chunk], rows[..., chunk:] = grad, 0
        return flat.view(channels, chunk, 2 * chunk + 1)[..., :chunk].sum(1)
