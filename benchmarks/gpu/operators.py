"""Times of every operator of the package: as dispatched, in its eager form, and with the eager form compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from gpu.shapes import Floor, Shape
from gpu.timing import Bench, why
from torch import Tensor

from gecko.ops.backends import dispatch
from gecko.ops.cema import CEMACoefficients, cema
from gecko.ops.chunk_attention import Pattern, chunk_attention
from gecko.ops.feed_forward import swiglu
from gecko.ops.gates import gated
from gecko.ops.loss import linear_cross_entropy
from gecko.ops.norms import group_rms_norm
from gecko.ops.qk_scale_shift import qk_scale_shift
from gecko.ops.timestep_norm import timestep_norm
from gecko.ops.working_memory import working_memory
from gecko.segments import Segments

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs and gradients."""
GECKO = "gecko"
AVERAGE, TIMESTEP, MIXING = "moving average", "timestep norm", "attention and memory"
ROUNDING = {"bfloat16": 2**-8, "float32": 1e-5}
"""Differences that one rounding of a result explains."""
FACTOR = 2.0
"""Largest difference of a kernel, in multiples of that of the eager form in the same dtype: both round, in places."""


@dataclass(frozen=True)
class Operator:
    """A function of float tensors, which all get gradients, and its floor."""

    name: str
    function: Function
    inputs: list[Tensor]
    floor: Floor


@dataclass(frozen=True)
class Timing:
    """Times of one form of one operator at one shape, in seconds; None, and a ``reason``, if it did not run."""

    operator: str
    form: str
    shape: str
    floor: Floor
    forward: float | None = None
    both: float | None = None
    launching_forward: float = 0.0
    """Seconds until the host had launched all kernels."""
    launching_both: float = 0.0
    reason: str = ""

    @property
    def host_bound(self) -> bool:
        """Whether launching takes the host longer than the kernels take the card, in forward or backward."""
        times = ((self.forward, self.launching_forward), (self.both, self.launching_both))
        return any(seconds is not None and launching > seconds for seconds, launching in times)


@dataclass(frozen=True)
class Agreement:
    """Differences from the eager form in float64, ‖y − exact‖ / ‖exact‖: the largest over outputs, and over gradients.

    Two forms that round to 16 bits at other places differ by rounding. What a form may differ by is therefore measured:
    ``eager_…`` are the differences of the eager form in the dtype of the kernels.
    """

    operator: str
    shape: str
    outputs: float | None = None
    gradients: float | None = None
    eager_outputs: float | None = None
    eager_gradients: float | None = None
    reason: str = ""
    """Why one of the forms did not run."""

    def is_wrong(self, dtype: str) -> bool | None:
        """Return whether the differences are more than rounding; None if that is not known."""
        pairs = ((self.outputs, self.eager_outputs), (self.gradients, self.eager_gradients))
        known = [(own, eager) for own, eager in pairs if own is not None and eager is not None]
        if len(known) < len(pairs):
            return None
        return any(not own <= max(ROUNDING[dtype], FACTOR * eager) for own, eager in known)


def operators(shape: Shape, bench: Bench) -> Iterator[Operator]:
    """Yield all operators one after the other, so that only the tensors of one exist at a time."""
    config, length = shape.config, shape.length
    wide, heads = (1, length, config.model_dim), config.num_heads
    # A model computes the segments once for all layers.
    segments = Segments.build(1, length, device=bench.device)
    coefficients = _coefficients(config.model_dim, config.cema_modes, bench)
    yield Operator(
        AVERAGE, lambda x, *c: cema(x, CEMACoefficients(*c), segments=segments)[0],
        [bench.random(*wide), *coefficients], shape.moving_average(),
    )  # fmt: skip
    weight, bias = (bench.random(config.model_dim, dtype=torch.float32) for _ in range(2))
    groups, betas, eps = config.timestep_groups, config.timestep_betas, config.norm_eps
    yield Operator(
        TIMESTEP, lambda x, w, b: timestep_norm(x, w, b, groups, betas, eps, segments=segments)[0],
        [bench.random(*wide), weight, bias], shape.norm(),
    )  # fmt: skip
    yield Operator(
        "RMS norm", lambda x, w: group_rms_norm(x, w, config.norm_groups, eps), [bench.random(*wide), weight],
        shape.norm(),
    )  # fmt: skip
    rows = [bench.random(4, config.key_dim, dtype=torch.float32) for _ in range(2)]
    yield Operator(
        "qk-scale-shift",
        lambda z, s, o: qk_scale_shift(z, s, o, heads, eps),
        [bench.random(1, length, config.key_dim), *rows],
        shape.qk_scale_shift(),
    )  # fmt: skip
    keys, values = (1, heads, length, config.key_head_dim), (1, heads, length, config.value_head_dim)
    yield Operator(
        "gate", gated,
        [bench.random(*values), bench.random(1, length, config.value_dim), bench.random(*values)], shape.gated(),
    )  # fmt: skip
    yield Operator("SwiGLU", swiglu, [bench.random(1, length, config.ffn_dim) for _ in range(2)], shape.swiglu())
    # Rows of a memory are nearly equal if its keys are short, and then rounding is most of the gradient of its queries.
    factors = *[config.key_head_dim**-0.5] * 3, 1.0
    mixed = [*(factor * bench.random(*keys) for factor in factors), bench.random(*values)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunk_attention(q, k, v, Pattern(config.chunk_size, config.attention), segments=segments)[0]

    def remember(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert config.memory != "none"
        return working_memory(q, k, v, config.chunk_size, rule=config.memory, segments=segments)[0]

    yield Operator("chunk attention", attend, [mixed[0], mixed[1], mixed[4]], shape.attention())
    yield Operator("working memory", remember, mixed[2:], shape.memory())
    yield Operator(
        MIXING, lambda q, k, qm, km, v: attend(q, k, v) + remember(qm, km, v), mixed, shape.attention_and_memory()
    )
    targets = torch.randint(config.vocab_size, (length,), device=bench.device)
    yield Operator(
        "head and loss", lambda x, w: linear_cross_entropy(x, w, targets),
        [bench.random(length, config.model_dim), bench.random(config.vocab_size, config.model_dim)], shape.loss(),
    )  # fmt: skip


def forward_and_backward(operator: Operator) -> None:
    """Compute the operator and all gradients, for a record of what it does: the gradients of outputs are unwritten."""
    inputs = [x.detach().requires_grad_() for x in operator.inputs]
    outputs = _outputs(operator.function(*inputs))
    torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs])


def _coefficients(channels: int, modes: int, bench: Bench) -> list[Tensor]:
    parameters = [bench.random(*size, dtype=torch.float32) for size in ((channels, modes),) * 2]
    theta = bench.random(channels, dtype=torch.float32)
    gamma = bench.random(channels, modes, 2, dtype=torch.float32)
    made = CEMACoefficients.from_parameters(*parameters, theta, gamma)
    return [made.input, made.log_damping, made.angle, made.output]


def measure(operator: Operator, form: str, shape: str, bench: Bench) -> Timing:
    """Time forward alone without gradients, and forward with backward."""
    inputs = [x.detach().requires_grad_() for x in operator.inputs]
    try:
        with torch.no_grad():
            forward = bench.seconds(lambda: operator.function(*inputs), queued=True)
            weights = [torch.randn_like(x) for x in _outputs(operator.function(*inputs))]
        both = bench.seconds(lambda: torch.autograd.grad(operator.function(*inputs), inputs, weights), queued=True)
    except Exception as error:
        return Timing(operator.name, form, shape, operator.floor, reason=why(error))
    return Timing(
        operator.name, form, shape, operator.floor, forward.seconds, both.seconds, forward.launching, both.launching
    )


def _outputs(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


@dataclass(frozen=True)
class Yardstick:
    """Inputs of an operator, weights of its outputs, its results in float64 and the differences of the eager form."""

    operator: Operator
    inputs: list[Tensor]
    weights: list[Tensor]
    exact: Results
    eager: tuple[float, float]

    @classmethod
    def of(cls, operator: Operator) -> Yardstick:
        inputs = [x.detach().requires_grad_() for x in operator.inputs]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        with eager_forms():
            with torch.no_grad():
                weights = [torch.randn_like(x) for x in _outputs(operator.function(*inputs))]
            exact = _outputs_and_gradients(operator, wide, [x.double() for x in weights])
            eager = _outputs_and_gradients(operator, inputs, weights)
        return cls(operator, inputs, weights, exact, _differences(eager, exact))

    def compare(self, shape: str) -> Agreement:
        """Compare the dispatched operator, or another form of its kernels that is applied."""
        try:
            found = _differences(_outputs_and_gradients(self.operator, self.inputs, self.weights), self.exact)
        except Exception as error:
            return Agreement(self.operator.name, shape, reason=why(error))
        return Agreement(self.operator.name, shape, *found, *self.eager)


def _outputs_and_gradients(operator: Operator, inputs: list[Tensor], weights: list[Tensor]) -> Results:
    outputs = _outputs(operator.function(*inputs))
    return tuple(x.detach() for x in outputs), torch.autograd.grad(outputs, inputs, weights)


def _differences(found: Results, exact: Results) -> tuple[float, float]:
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
