"""Every operator of the package: its floor, its time as dispatched, and its distance from the eager form in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from gpu.record import Row
from gpu.timing import DTYPE, Bench, why
from torch import Tensor

from gecko.config import GeckoConfig
from gecko.ops.backends import dispatch
from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated
from gecko.ops.loss import linear_cross_entropy
from gecko.ops.norms import group_rms_norm
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import Statistics, timestep_norm
from gecko.ops.working_memory import working_memory
from gecko.segments import Segments

Pair = tuple[float, float]
"""Two numbers: one for the forward pass (or the outputs), one with the backward pass (or for the gradients)."""
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs and gradients."""
GECKO = "gecko"
"""Form with the package's kernels as they are."""
AVERAGE, TIMESTEP, NORM, QUERY_KEY = "moving average", "timestep norm", "RMS norm", "qk-scale-shift"
ATTENTION, MEMORY, MIXING, HEAD = "chunk attention", "working memory", "attention and memory", "head and loss"
SCAN_CHUNK = 64
"""Steps per product in CEMA's matrix form, which is the form whose FLOPs are counted."""
ROUNDING = 2**-8
"""Difference that one rounding of a result to bfloat16 explains."""
FACTOR = 2.0
"""Largest difference of a kernel, in multiples of that of the eager form in the same dtype: both round, in places."""


@dataclass(frozen=True)
class Shape:
    """One row of ``length`` tokens in a model of ``config``."""

    name: str
    config: GeckoConfig
    length: int


@dataclass(frozen=True)
class Floor:
    """Minimum work of an operator: each input read once, each output written once, and the products of the equations.

    ``both`` is forward and backward together. The products of backward are twice those of forward; recomputation in a
    kernel is not counted.
    """

    numbers_forward: float
    numbers_both: float
    flops_forward: float = 0.0

    @property
    def flops_both(self) -> float:
        return 3 * self.flops_forward


@dataclass(frozen=True)
class Operator:
    """A function of float tensors, which all get gradients, and its floor."""

    name: str
    function: Function
    inputs: list[Tensor]
    floor: Floor


def is_wrong(difference: Pair, eager: Pair) -> bool:
    """Return whether differences from float64, ‖y − exact‖ / ‖exact‖, are more than rounding.

    Two forms that round to 16 bits at other places differ by rounding. What a form may differ by is therefore measured:
    ``eager`` are the differences of the eager form in the dtype of the kernels.
    """
    return any(not own <= max(ROUNDING, FACTOR * of) for own, of in zip(difference, eager, strict=True))


def operators(shape: Shape, bench: Bench) -> Iterator[Operator]:
    """Yield all operators one after the other, so that only the tensors of one exist at a time."""
    config, length = shape.config, shape.length
    eps, heads, memory = config.norm_eps, config.num_heads, config.memory
    assert memory != "none"
    wide, narrow, hidden = ((1, length, width) for width in (config.model_dim, config.key_dim, config.ffn_dim))
    keys, values = (1, heads, length, config.key_head_dim), (1, heads, length, config.value_head_dim)
    # A model computes the segments once for all layers.
    segments = Segments.build(1, length, device=bench.device)
    weight, bias = (bench.random(config.model_dim, dtype=torch.float32) for _ in range(2))

    def made(
        name: str, function: Function, inputs: list[Tensor], written: int, flops: float = 0.0, unread: int = 0
    ) -> Operator:
        """Give the operator its floor; backward does not read ``unread`` numbers of the inputs."""
        read = sum(x.numel() for x in inputs if x.dtype == DTYPE)
        return Operator(name, function, inputs, Floor(read + written, 3 * read + 2 * written - unread, flops))

    yield made(
        AVERAGE, lambda x, *c: cema(x, CEMACoefficients(*c), segments=segments)[0],
        [bench.random(*wide), *_coefficients(config, bench)], math.prod(wide),
        2 * math.prod(wide) * (SCAN_CHUNK + 4 * config.cema_modes),
    )  # fmt: skip
    statistics = Statistics(config.timestep_groups, config.timestep_betas, eps)
    yield made(
        TIMESTEP, lambda x, w, b: timestep_norm(x, w, b, statistics, segments=segments)[0],
        [bench.random(*wide), weight, bias], math.prod(wide),
    )  # fmt: skip
    yield made(
        NORM, lambda x, w: group_rms_norm(x, w, config.norm_groups, eps), [bench.random(*wide), weight], math.prod(wide)
    )
    rows = [bench.random(4, config.key_dim, dtype=torch.float32) for _ in range(2)]
    yield made(
        QUERY_KEY, lambda z, s, o: qk_scale_shift(z, s, o, heads, eps), [bench.random(*narrow), *rows],
        4 * math.prod(narrow),
    )  # fmt: skip
    inputs = [bench.random(*values), bench.random(1, length, config.value_dim), bench.random(*values)]
    yield made("gate", gated, inputs, math.prod(values), unread=math.prod(values))
    yield made("SwiGLU", swiglu, [bench.random(*hidden) for _ in range(2)], math.prod(hidden))
    # Rows of a memory are nearly equal if its keys are short, and then rounding is most of the gradient of its queries.
    factors = *[config.key_head_dim**-0.5] * 3, 1.0
    q, k, qm, km, v = [*(factor * bench.random(*keys) for factor in factors), bench.random(*values)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_attention(q, k, v, Pattern(config.chunk_size, config.attention), segments=segments)[0]

    def remember(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return working_memory(q, k, v, config.chunk_size, rule=memory, segments=segments)[0]

    # Pairs of a query and a key in its window, in one head. The memory is read, corrected and written once per token.
    chunk, chunks = config.chunk_size, length / config.chunk_size
    pairs = chunks * chunk * (chunk + 1) / 2 + max(0.0, chunks - 1) * chunk**2
    attending = 2 * pairs * (config.key_dim + config.value_dim)
    remembering = 2 * 3 * length * config.key_dim * config.value_head_dim
    yield made(ATTENTION, attend, [q, k, v], v.numel(), attending)
    yield made(MEMORY, remember, [qm, km, v], v.numel(), remembering)
    yield made(
        MIXING, lambda q, k, qm, km, v: attend(q, k, v) + remember(qm, km, v), [q, k, qm, km, v], v.numel(),
        attending + remembering,
    )  # fmt: skip
    targets = torch.randint(config.vocab_size, (length,), device=bench.device)
    yield made(
        HEAD, lambda x, w: linear_cross_entropy(x, w, targets),
        [bench.random(length, config.model_dim), bench.random(config.vocab_size, config.model_dim)], 0,
        2 * length * config.model_dim * config.vocab_size,
    )  # fmt: skip


def _coefficients(config: GeckoConfig, bench: Bench) -> list[Tensor]:
    sizes = (config.model_dim, config.cema_modes)
    shapes = sizes, sizes, sizes[:1], (*sizes, 2)
    made = CEMACoefficients.from_parameters(*(bench.random(*shape, dtype=torch.float32) for shape in shapes))
    return [made.input, made.log_damping, made.angle, made.output]


def operator_of(name: str, shape: Shape, bench: Bench) -> Operator:
    return next(operator for operator in operators(shape, bench) if operator.name == name)


def outputs_and_gradients(operator: Operator, inputs: list[Tensor], weights: list[Tensor] | None = None) -> Results:
    """Compute the operator, and the gradients of the sum of its outputs with ``weights``: unwritten ones by default."""
    outputs = _outputs(operator, inputs)
    weights = weights or [torch.empty_like(x) for x in outputs]
    return tuple(x.detach() for x in outputs), torch.autograd.grad(outputs, inputs, weights)


def forward_and_backward(operator: Operator) -> None:
    """Compute the operator and all gradients, for a record of what it does."""
    outputs_and_gradients(operator, [x.detach().requires_grad_() for x in operator.inputs])


def _outputs(operator: Operator, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    output = operator.function(*inputs)
    return output if isinstance(output, tuple) else (output,)


def measure(operator: Operator, shape: str, bench: Bench) -> Row:
    """Time forward alone without gradients, and forward with backward."""
    inputs, floor = [x.detach().requires_grad_() for x in operator.inputs], operator.floor
    with torch.no_grad():
        forward = bench.seconds(lambda: operator.function(*inputs), queued=True)
        weights = [torch.randn_like(x) for x in _outputs(operator, inputs)]
    both = bench.seconds(lambda: torch.autograd.grad(_outputs(operator, inputs), inputs, weights), queued=True)
    moved = [DTYPE.itemsize * numbers for numbers in (floor.numbers_forward, floor.numbers_both)]
    flops, (seconds, launching) = [floor.flops_forward, floor.flops_both], zip(forward, both, strict=True)
    return {
        "table": "operators", "operator": operator.name, "form": GECKO, "shape": shape, "seconds": seconds,
        "launching": launching, "bytes": moved, "flops": flops,
        "bandwidth": [a / b for a, b in zip(moved, seconds, strict=True)],
        "rate": [a / b for a, b in zip(flops, seconds, strict=True)],
        "host": "host-bound" * any(a > b for a, b in zip(launching, seconds, strict=True)),
    }  # fmt: skip


def yardstick(operator: Operator) -> Callable[[], Row]:
    """Compute an operator in float64; return a function that compares the dispatched one, or another form that is
    applied: the largest differences of outputs, and of gradients."""
    inputs = [x.detach().requires_grad_() for x in operator.inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    with eager_forms():
        with torch.no_grad():
            weights = [torch.randn_like(x) for x in _outputs(operator, inputs)]
        exact = outputs_and_gradients(operator, wide, [x.double() for x in weights])
        eager = _differences(outputs_and_gradients(operator, inputs, weights), exact)

    def compare() -> Row:
        try:
            found = _differences(outputs_and_gradients(operator, inputs, weights), exact)
        except Exception as error:  # its times are not lost
            return {"wrong": None, "verdict": f"not compared: {why(error)}"}
        wrong = is_wrong(found, eager)
        return {"difference": found, "eager": eager, "wrong": wrong, "verdict": "**WRONG**" * wrong}

    return compare


def _differences(found: Results, exact: Results) -> Pair:
    outputs, gradients = (max(map(_difference, *pair)) for pair in zip(found, exact, strict=True))
    return outputs, gradients


def _difference(found: Tensor, exact: Tensor) -> float:
    """Return the relative difference; infinite if a number is NaN, so that it is the largest of several."""
    difference = float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return math.inf if math.isnan(difference) else difference


@contextmanager
def eager_forms() -> Iterator[None]:
    """Within the context, operators use no kernels."""
    with (
        patch.object(dispatch, "triton_kernels_run_on", lambda _: False),
        patch.object(dispatch, "_cpu_kernels_installed", lambda: False),
    ):
        yield
