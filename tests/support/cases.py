"""Cases for the laws: every operator behind one interface, and cases of lengths, documents and earlier tokens.

A new operator adds an ``Operator`` and a list of cases, no test code.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import gecko
from gecko.config import PAPER
from gecko.ops.cema import CEMACoefficients, cema, cema_reference, empty_cema_state
from gecko.ops.chunk_attention import AttentionState, Pattern, chunk_attention, chunk_attention_reference
from gecko.ops.short_convolution import short_convolution
from gecko.ops.timestep_norm import Statistics, TimestepNormState, timestep_norm, timestep_norm_reference
from gecko.ops.working_memory import WorkingMemoryState, working_memory, working_memory_reference
from gecko.runtime.tensors import TensorRecord, map_tensors, tensors_of
from gecko.segments import Clock, Segments

CHUNK = 8
"""Attention chunk size of most operators."""

LONG_CHUNK = 5 * CHUNK
"""Attention chunk size of the other operators: more queries than a kernel takes at once."""

Form = Callable[[list[Tensor], list[Tensor], Any, Segments], tuple[Tensor, Any]]
"""Maps (parameters, inputs, state, segments) to (output, state after the last step)."""


@dataclass(frozen=True)
class Operator:
    """One operator in one configuration.

    draw_parameters: maps a generator to parameters. draw_inputs: maps (batch, length, generator) to inputs; all
    float64. empty: maps (batch, dtype) to the initial state. ``time`` is the axis of time of inputs and output.
    """

    name: str
    time: int
    draw_parameters: Callable[[torch.Generator], list[Tensor]]
    draw_inputs: Callable[[int, int, torch.Generator], list[Tensor]]
    empty: Callable[[int, torch.dtype], Any]
    fast: Form
    reference: Form

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Case:
    """How many tokens are read, how they are divided into documents, and how many tokens each row has read before.

    Rows use the numbers in ``read`` in turn. The tokens read before contain the start of the current document.
    """

    length: int
    layout: str = "one"
    read: tuple[int, ...] = (0,)
    batch: int = 2
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        after = "" if not any(self.read) else "-after" + "+".join(map(str, self.read))
        single = "-float32" if self.dtype == torch.float32 else ""
        return f"B{self.batch}-T{self.length}-{self.layout}{after}{single}"

    @property
    def positions(self) -> list[int]:
        return [self.read[row % len(self.read)] for row in range(self.batch)]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(str(self).encode()))


@dataclass(frozen=True)
class Problem:
    """Inputs of one operator for one case. ``state`` and ``clock`` are None if nothing was read before."""

    operator: Operator
    parameters: list[Tensor]
    inputs: list[Tensor]
    state: Any
    clock: Clock | None
    ids: Tensor | None

    @property
    def batch(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def length(self) -> int:
        return self.inputs[0].shape[self.operator.time]

    def double(self) -> Problem:
        return dataclasses.replace(
            self, parameters=[x.double() for x in self.parameters], inputs=[x.double() for x in self.inputs],
            state=map_state(self.state, lambda x: x.double() if x.is_floating_point() else x),
        )  # fmt: skip


def map_state(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if state is None:
        return None
    return state.map(function) if isinstance(state, TensorRecord) else function(state)


def tensors(state: Any) -> dict[str, Tensor]:
    return state.tensors() if isinstance(state, TensorRecord) else {"state": state}


def document_starts(layout: str, length: int, position: int, generator: torch.Generator) -> Tensor:
    """Return (length,) bool, True where documents start in a row whose first token is at ``position``."""
    places = position + torch.arange(length)
    starts = torch.zeros(length, dtype=torch.bool)
    match layout:
        case "one":
            pass
        case "first":
            starts[0] = True
        case "last":
            starts[-1] = True
        case "edges":  # at chunk borders, two or three chunks apart: documents that reach the memory
            starts = (places % (5 * CHUNK) == 0) | (places % (5 * CHUNK) == 2 * CHUNK)
        case "singles":  # more than a chunk of documents of one token, then a longer one
            starts[: min(length, max(1, min(length // 2, CHUNK + 3)))] = True
        case "packed":  # about four at random places
            starts = torch.rand(length, generator=generator) < min(0.5, 4 / length)
        case _:
            raise ValueError(layout)
    return starts


LAYOUTS = ("one", "first", "last", "edges", "singles", "packed")


def problem(operator: Operator, case: Case) -> Problem:
    """Return the problem of a case; the reference computes the state from the tokens read before."""
    generator = case.generator()
    parameters = [_rounded(x, case.dtype) for x in operator.draw_parameters(generator)]
    inputs = [_rounded(x, case.dtype) for x in operator.draw_inputs(case.batch, case.length, generator)]
    state, clock, ids = None, None, None
    if any(case.read):
        state, clock = _read_before(operator, [x.double() for x in parameters], case, generator)
        state = map_state(state, lambda x: x.to(case.dtype) if x.is_floating_point() else x)
    if case.layout != "one":
        rows = [document_starts(case.layout, case.length, p, generator) for p in case.positions]
        ids = torch.stack(rows).long().cumsum(1) + 1
    return Problem(operator, parameters, inputs, state, clock, ids)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().to(dtype)


def _read_before(
    operator: Operator, parameters: list[Tensor], case: Case, generator: torch.Generator
) -> tuple[Any, Clock]:
    """Return state and clock, computed by the reference row by row. The last two thirds of a row are document 1."""
    rows = []
    for position in case.positions:
        state, clock = operator.empty(1, torch.float64), Clock.start(1)
        if position:
            ids = (torch.arange(position) >= position // 3).long().unsqueeze(0)
            segments = Segments.build(1, position, segment_ids=ids, clock=clock)
            inputs = operator.draw_inputs(1, position, generator)
            _, state = operator.reference(parameters, inputs, state, segments)
            clock = segments.end
        rows.append((state, Clock(clock.position, clock.document_start, torch.ones(1, dtype=torch.int64))))
    return stack([state for state, _ in rows]), stack([clock for _, clock in rows])


def stack(states: list[Any]) -> Any:
    """Concatenate the rows of several states into one batch."""
    parts = [iter(tensors(state).values()) for state in states]
    return map_state(states[0], lambda _: torch.cat([next(part) for part in parts]))


# Operators. Sizes are small and all different, so that swapped axes are noticed.


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _coefficients(parameters: list[Tensor]) -> CEMACoefficients:
    return CEMACoefficients.from_parameters(*parameters)


def _cema(channels: int, modes: int) -> Operator:
    each = channels, modes
    return Operator(
        f"cema-{channels}x{modes}", 1,
        lambda g: [_normal(g, *each), _normal(g, *each), _normal(g, channels, scale=2.0), _normal(g, *each, 2)],
        lambda b, t, g: [_normal(g, b, t, channels)],
        lambda b, dtype: empty_cema_state(b, *each, dtype),
        lambda p, x, state, segments: cema(x[0], _coefficients(p), state, segments=segments),
        lambda p, x, state, segments: cema_reference(x[0], _coefficients(p), state, segments),
    )  # fmt: skip


CEMA = _cema(5, 3)


def _timestep_norm(betas: tuple[float, float] | None) -> Operator:
    statistics = Statistics(2, betas, 1e-3)
    return Operator(
        "timestep-norm-" + ("cumulative" if betas is None else f"decay{betas[0]}"), 1,
        lambda g: [_normal(g, 6), _normal(g, 6)],
        lambda b, t, g: [_normal(g, b, t, 6) + 3 * _normal(g, b, 1, 6)],
        lambda b, dtype: TimestepNormState.empty(b, 2, dtype),
        lambda p, x, state, segments: timestep_norm(x[0], *p, statistics, state, segments=segments),
        lambda p, x, state, segments: timestep_norm_reference(x[0], *p, statistics, state, segments=segments),
    )  # fmt: skip


TIMESTEP_NORMS = [_timestep_norm((0.999, 0.9999)), _timestep_norm((0.7, 0.9)), _timestep_norm(None)]


def _attention(pattern: Pattern, key: int = 4, value: int = 3, shared: int = 1) -> Operator:
    """Attention of two heads of keys and values, each of which ``shared`` heads of queries use."""

    def fast(p: list[Tensor], x: list[Tensor], state: Any, segments: Segments) -> tuple[Tensor, Any]:
        return chunk_attention(x[0], x[1], x[2], pattern, state=state, segments=segments)

    def reference(p: list[Tensor], x: list[Tensor], state: Any, segments: Segments) -> tuple[Tensor, Any]:
        return chunk_attention_reference((x[0], x[1], x[2]), pattern, state, segments)

    return Operator(
        f"{pattern.attention}{pattern.chunk_size}-{key}x{value}-rope{pattern.rope_heads}"
        + (f"-sinks{pattern.sinks}" if pattern.sinks else "") + (f"-shared{shared}" if shared > 1 else ""), 2,
        lambda g: [],
        lambda b, t, g: [_normal(g, b, 2 * shared, t, key), _normal(g, b, 2, t, key), _normal(g, b, 2, t, value)],
        lambda b, dtype: AttentionState.empty(b, 2, pattern.chunk_size, key, value, dtype, sinks=pattern.sinks),
        fast, reference,
    )  # fmt: skip


ATTENTIONS = [
    _attention(Pattern(CHUNK, attention, 100.0, heads))
    for attention in ("sliding_chunk", "chunk", "sliding_window")
    for heads in (2, 1, 0)
] + [
    _attention(Pattern(CHUNK, sinks=1), shared=3),
    _attention(Pattern(CHUNK, "chunk", rope_base=100.0, sinks=3)),
    _attention(Pattern(CHUNK, "sliding_window", rope_frequencies=(1.0, 0.3), sinks=2), shared=2),
    _attention(Pattern(CHUNK), shared=2),
]


def _memory(rule: str, key: int = 3, value: int = 4) -> Operator:
    return Operator(
        f"memory-{rule}-{key}x{value}", 2,
        lambda g: [],
        lambda b, t, g: [_normal(g, b, 2, t, key), _normal(g, b, 2, t, key), _normal(g, b, 2, t, value)],
        lambda b, dtype: WorkingMemoryState.empty(rule, b, 2, key, value, dtype),
        lambda p, x, state, segments: working_memory(*x, CHUNK, rule=rule, state=state, segments=segments),
        lambda p, x, state, segments: working_memory_reference((x[0], x[1], x[2]), CHUNK, rule, state, segments),
    )  # fmt: skip


MEMORIES = [_memory("adaptive"), _memory("linear"), _memory("orthogonal")]


def short_convolution_reference(x: Tensor, taps: Tensor, state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Compute ``short_convolution`` step by step, one row at a time."""
    weights, outputs, states = taps.softmax(-1), [], []
    for row in range(segments.batch):
        begin, held = int(segments.clock.position[row]), list(state[row].unbind(0))
        found = []
        for t, step in enumerate(x[row].unbind(0)):
            read = begin + t - int(segments.document_starts[row, t])  # steps of the document before this one
            held = [old if len(held) - i <= read else torch.zeros_like(old) for i, old in enumerate(held)]
            window = [*held, step]
            found.append(sum((weights[:, i] * old for i, old in enumerate(window)), torch.zeros_like(step)))
            held = window[1:]
        outputs.append(torch.stack(found))
        states.append(torch.stack(held) if held else state[row])
    return torch.stack(outputs), torch.stack(states)


def _convolution(width: int, channels: int) -> Operator:
    return Operator(
        f"convolution-{width}x{channels}", 1,
        lambda g: [_normal(g, channels, width)],
        lambda b, t, g: [_normal(g, b, t, channels)],
        lambda b, dtype: torch.zeros(b, width - 1, channels, dtype=dtype),
        lambda p, x, state, segments: short_convolution(x[0], p[0], state, segments=segments),
        lambda p, x, state, segments: short_convolution_reference(x[0], p[0], state, segments),
    )  # fmt: skip


CONVOLUTIONS = [_convolution(4, 5), _convolution(1, 3), _convolution(9, 2)]

WIDE = [
    _cema(37, 5),
    _cema(16, 16),
    *(_attention(Pattern(CHUNK, attention, 100.0, 1), 16, 32) for attention in ("sliding_chunk", "sliding_window")),
    *(_attention(Pattern(CHUNK, attention, sinks=2), 16, 32, 3) for attention in ("sliding_chunk", "chunk")),
    *(
        _attention(Pattern(LONG_CHUNK, attention, 100.0, 2), 32, 48)
        for attention in ("sliding_chunk", "chunk", "sliding_window")
    ),
    _memory("adaptive", 16, 48),
    _memory("adaptive", 32, 80),
]
"""Heads as large as the C kernels require, and larger than one of their blocks."""
FIRST = [WIDE[0], WIDE[2], WIDE[6], WIDE[9]]
"""One of each operator, and of attention with short and long chunks."""

# Models. Every value of every field that selects another code path occurs in several variants.

SMALL = gecko.GeckoConfig(
    vocab_size=37, num_layers=2, model_dim=32, key_dim=16, value_dim=24, num_heads=2, ffn_dim=40, cema_modes=4,
    chunk_size=CHUNK, timestep_groups=4,
)  # fmt: skip

LLAMA = {
    "queries_and_keys": "separate", "value_activation": "none", "norm": "rms", "local_mixing": "none", "gate": "none",
    "hidden_branch": False, "memory": "none",
}  # fmt: skip
"""A Llama, whose attention is that of the window."""

VARIANTS = {
    "gecko": {},
    "chunk": {"attention": "chunk", "rope_heads": 1, "scale_embedding": True},
    "window": {"attention": "sliding_window", "two_hop_residual": True, "ffn_scale": True},
    "linear-memory": {"memory": "linear", "tie_embedding": True, "rope_heads": 0},
    "no-memory": {"memory": "none", "norm_groups": 4, "norm_affine": False},
    "cumulative": {"timestep_betas": None, "swiglu": False},
    "learned-skip": {"cema_skip": "learned", "timestep_betas": (0.9, 0.97), "tie_embedding": True},
    "window-linear": {"attention": "sliding_window", "memory": "linear", "timestep_betas": None, "rope_heads": 1},
    "chunk-linear": {"attention": "chunk", "memory": "linear", "cema_skip": "learned", "two_hop_residual": True},
    "megalodon": {
        "attention": "chunk", "memory": "none", "timestep_betas": None, "cema_skip": "learned",
        "two_hop_residual": True, "swiglu": False, "rope_base": 100_000.0,
    },
    "llama": {**LLAMA, "num_heads": 4, "key_value_heads": 2, "sinks": 1, "norm_groups": 2},
    "llama-without-sinks": {**LLAMA, "key_value_heads": 1, "query_key_norm": True},
    "llama-window": {
        **LLAMA, "attention": "sliding_window", "query_key_norm": True, "sinks": 3, "norm_affine": False,
        "rope_frequencies": (1.0, 0.5, 0.2, 0.01),
    },
    "separate": {
        "queries_and_keys": "separate", "query_key_norm": True, "gate": "sum", "sinks": 2, "hidden_branch": False,
    },
    "separate-linear": {"queries_and_keys": "separate", "memory": "linear", "gate": "none", "value_activation": "none"},
    "shared-keys": {"queries_and_keys": "separate", "num_heads": 4, "key_value_heads": 2, "memory_factor": 0.5},
    "shared-rms": {"norm": "rms", "local_mixing": "none", "gate": "sum"},
    "gekko": {
        "queries_and_keys": "separate", "query_key_norm": True, "num_heads": 4, "key_value_heads": 2, "gate": "sum",
        "gate_activation": "softplus", "gate_bias": False, "hidden_branch": False, "local_mixing": "none",
        "output_norm": True, "convolution_width": 4, "query_key_bias": False, "rms_eps": 1e-3,
        "rope_frequencies": (1.0, 0.0),
    },
    "orthogonal": {"queries_and_keys": "separate", "memory": "orthogonal", "num_heads": 4, "key_value_heads": 2},
    "later-gecko": {
        "gate": "sum", "gate_activation": "softplus", "gate_bias": False, "memory_gate_channels": 3,
        "timestep_eps": 1e-3,
    },
    "paper": {"gate": "sum", "unit_vectors": "whole", "cema_expansion": True, "memory_factor": 0.5},
}  # fmt: skip

PAPER_VARIANTS = [name for name, changes in VARIANTS.items() if not changes.keys() & PAPER.keys()]
IN_C = [name for name in VARIANTS if name not in ("gekko", "later-gecko", "orthogonal", "paper", "shared-keys")]
"""Variants that C decodes."""
IN_TRITON = [
    name for name, changes in VARIANTS.items()
    if changes.get("memory", "adaptive") in ("adaptive", "none") and name not in ("gekko", "later-gecko", "paper")
]  # fmt: skip
"""Variants that Triton decodes."""
ON_RANKS = [name for name in VARIANTS if name not in ("gekko", "orthogonal")]
"""Variants whose rows several ranks may share."""


def model(variant: str, dtype: torch.dtype = torch.float64, **changes: Any) -> gecko.Gecko:
    """Return a small model with noise on all parameters, so that none has a special initial value (zero, identity)."""
    torch.manual_seed(zlib.crc32(variant.encode()))
    made = gecko.Gecko(dataclasses.replace(SMALL, **VARIANTS[variant], **changes)).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# Cases. Lengths are near the attention chunk (8) and the scan chunk (64).

COMMON = [
    *(Case(length) for length in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 63, 65, 127)),
    Case(200, batch=1),
    *(Case(length, "packed") for length in (2, 9, 65, 127)),
    Case(200, "packed", batch=1),
    Case(63, "singles"),
    Case(50, "edges"),
    *(Case(length, "one", (5, 22)) for length in (1, 2, 30)),
    *(Case(length, "first", (17, 17)) for length in (1, 12, 30)),
    *(Case(length, "packed", (23, 16)) for length in (1, 40)),
    *(Case(40, layout, (13,)) for layout in ("one", "packed", "edges", "singles", "last")),
    Case(50, "packed", (0, 3, 19, 16), batch=4),
    Case(1, "one", (0, 7, 8, 31), batch=4),
    Case(1, "packed", (15, 16, 23, 24), batch=4),
    Case(66, dtype=torch.float32),
    Case(90, "packed", (21,), dtype=torch.float32),
]
"""Cases for every operator."""

SINGLE = [
    *(dataclasses.replace(case, dtype=torch.float32) for case in COMMON if case.dtype == torch.float64),
    Case(300, "packed", (40, 120), batch=3, dtype=torch.float32),
    Case(257, "one", (80, 0), dtype=torch.float32),
    Case(130, "singles", (0, 40), batch=11, dtype=torch.float32),
    Case(600, "packed", (40,), batch=1, dtype=torch.float32),
]
"""Cases for the C kernels (float32 only): longer than their tiles and tasks, with more rows than one task takes."""

ONE_CONFIGURATION = [case for case in COMMON if case.length in (1, 9, 40, 50)]
"""Cases for other configurations of an operator."""

SINGLE_OF_OTHERS = [case for case in SINGLE if case.length in (9, 40, 50, 130, 300)]
"""Those of other configurations of the C kernels."""

TINY = [Case(10, "one", (19,), batch=1), Case(10, "packed", (19,), batch=1), Case(1, "one", (19,), batch=1)]
"""Cases for numerical gradients: they end inside a chunk, and every part of the state is in use at the start."""

anything = st.builds(
    Case,
    length=st.integers(1, 45),
    layout=st.sampled_from(LAYOUTS),
    read=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    batch=st.integers(1, 3),
)


def in_pages(state: gecko.GeckoState) -> gecko.GeckoState:
    """Return the state with its tensors as views of one page per row, as they lie in a cache of pages."""
    tensors = tensors_of((*state.mixers, state.final_norm))
    sizes = [-(-x[0].nbytes // 64) * 64 for x in tensors]
    pages, begin = torch.zeros(state.batch_size, sum(sizes), dtype=torch.uint8), 0
    for index, (x, size) in enumerate(zip(tensors, sizes, strict=True)):
        content = pages[:, begin : begin + x[0].nbytes].view(x.dtype)
        tensors[index] = (content.unflatten(1, x.shape[1:]) if x.dim() > 1 else content[:, 0]).copy_(x)
        begin += size
    views = iter(tensors)
    mixers = tuple(mixer.map(lambda _: next(views)) for mixer in state.mixers)
    return dataclasses.replace(state, mixers=mixers, final_norm=map_tensors(state.final_norm, lambda _: next(views)))
