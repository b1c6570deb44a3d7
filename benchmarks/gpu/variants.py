"""Other forms of kernels, tried on a card beside the chosen ones: the fastest that is as right becomes the choice.

A variant edits the source of production kernels, changes their launches, or replaces constants, so each stays beside
the code that it differs from; an edit whose text is no longer in the source is an error. Variants are for
measurements: ``quarter_hour.py`` compares each with the eager form and times it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from gpu.steps import kernel_name
from torch import Tensor

from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention import triton_wide
from gecko.ops.working_memory.chunked import product

FOLDER = Path(__file__).parents[2] / "build" / "variants"
"""Where edited modules are written: Triton reads the source of kernels from files."""

Change = Callable[[Launch], Launch]
Edits = Mapping[str, Sequence[tuple[str, str]]]
"""By module below ``gecko.ops``, pairs of code that is there and of what replaces it everywhere."""


@dataclass(frozen=True)
class Variant:
    """Another form of some kernels, which are named as by ``kernel_name``."""

    family: str
    """Variants of one family exclude each other."""
    name: str
    kernels: Mapping[str, str | None]
    """By name of the kernel, the module of its edited form; None if its code is not edited."""
    edits: Edits = dataclasses.field(default_factory=dict)
    change: Change = lambda launch: launch
    constants: tuple[tuple[Any, str, Any], ...] = ()
    """Objects, names and values of constants to replace."""

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"

    def of(self, launch: Launch) -> Launch:
        """Return the launch in this form."""
        name = kernel_name(launch)
        if name not in self.kernels:
            return launch
        module = self.kernels[name]
        if module is not None:
            code = edited(self.edits, f"{self.family}_{self.name}", module)
            launch = dataclasses.replace(launch, kernel=getattr(code, launch.kernel.__name__))
        return self.change(launch)


@contextmanager
def applied(*variants: Variant) -> Iterator[None]:
    """Within the context, launches have the forms of these variants, whatever runs or records them."""
    before = Launch.run

    def run(launch: Launch) -> Any:
        for variant in variants:
            launch = variant.of(launch)
        return before(launch)

    with ExitStack() as stack:
        for owner, name, value in (constant for variant in variants for constant in variant.constants):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.object(Launch, "run", run))
        yield


def edited(edits: Edits, name: str, module: str) -> ModuleType:
    """Return an edited copy of a module, which imports edited copies of the others that ``edits`` names.

    Raises:
        ValueError: code that is to be replaced does not occur.
    """
    return _edited(tuple((key, tuple(pairs)) for key, pairs in edits.items()), re.sub(r"\W+", "_", name), module)


@cache
def _edited(edits: tuple[Any, ...], name: str, module: str) -> ModuleType:
    whole = importlib.util.find_spec(f"gecko.ops.{module}")
    assert whole is not None and whole.origin is not None
    source = Path(whole.origin).read_text(encoding="utf-8")
    for old, new in dict(edits)[module]:
        if old not in source:
            raise ValueError(f"the variant {name} replaces code that must occur in {module}; it does not: {old!r}.")
        source = source.replace(old, new)
    for other, _ in edits:
        if other != module and f"gecko.ops.{other} " in source:
            source = source.replace(f"gecko.ops.{other} ", f"{_edited(edits, name, other).__name__} ")
    own = f"gecko_{name}_{module.replace('.', '_')}"
    path = FOLDER / f"{own}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != source:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None and spec.loader is not None
    sys.modules[own] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[own])
    return sys.modules[own]


def sized(launch: Launch, *, warps: int | None = None, stages: int | None = None, registers: int | None = None,
          **arguments: Any) -> Launch:  # fmt: skip
    """Return the launch with other sizes; None leaves a size as it is."""
    given = {"warps": warps, "stages": stages, "registers": registers}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(launch, arguments={**launch.arguments, **arguments}, **given)


# ---- Moving average

_ITEMS_LAST = (
    ("2 * tl.arange(0, chunk // 2)[None, None, :] +", "2 * tl.arange(0, chunk // 2)[None, :, None] +"),
    ("(i_t >= i_begin[None, :, None]) & (i_t < i_end[None, :, None])",
     "(i_t >= i_begin[None, None, :]) & (i_t < i_end[None, None, :])"),
    ("offsets = (i_first[None, :, None] + i_t)", "offsets = (i_first[None, None, :] + i_t)"),
    ("(3, 1, 2, 0))", "(3, 2, 1, 0))"),
)  # fmt: skip
"""Lanes span rows of 16 bytes: half the conflicts of banks."""
_ROUNDED_INTO_STATE = (
    ("product(b_x, g_real, z_real, precision), product(b_x, g_imag, z_imag, precision)",
     "rough_product(b_x, g_real, z_real, precision), rough_product(b_x, g_imag, z_imag, precision)"),
    ("g_real, g_imag = factor(g_real, precision), factor(g_imag, precision)",
     "g_real, g_imag = rounded_factor(g_real, precision), rounded_factor(g_imag, precision)"),
)  # fmt: skip
_FLOAT16 = (
    ("    return b_x if precision ==", "    return b_x.to(tl.float16) if precision =="),
    ("""        bits = b_x.to(tl.int32, bitcast=True) & -65536  # the high half of a float32 is the bfloat16 below it
        b_high = bits.to(tl.float32, bitcast=True)
        b_low = (b_x - b_high).to(tl.bfloat16)
        b_high = b_high.to(tl.bfloat16)
""", """        b_high = tl.minimum(tl.maximum(b_x, -65504.0), 65504.0).to(tl.float16)
        b_low = b_high
"""),
    ("""    if precision == "bf16":
        b_sum = rough_product(b_x, right[1], b_sum, precision)
""", ""),
    ("""    if precision == "bf16":
        b_sum = rough_product(low, right[0], b_sum, precision)
""", ""),
)  # fmt: skip
"""Tables, states and inputs in float16: one product in the place of two and three."""


def _moving_averages() -> Iterator[Variant]:
    forward, backward = "cema.triton_forward", "cema.triton_backward"
    for name, edits, both in (
        ("items last", _ITEMS_LAST, True),
        ("items last, rounded into the state", _ITEMS_LAST + _ROUNDED_INTO_STATE, True),
        ("items last, float16", _ITEMS_LAST + _FLOAT16, False),
    ):
        kernels = {"cema.filter_kernel": forward} | ({"cema.gradients_kernel": backward} if both else {})
        yield Variant("moving average", name, kernels, {forward: edits, backward: ()})


# ---- Norms

_SUMS = """@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _standardised("""
_WEIGHT_FIRST = """    b_weight = 1.0
    if p_weight is not None:
        i_weight = tl.zeros([steps, 1, 1], tl.int32) + i_column[None]
        m_weight = tl.broadcast_to(m_column[None], [steps, together, width])
        b_weight = 1 + tl.load(p_weight + i_weight, mask=m_weight, other=0.0).to(tl.float32)
    for first in tl.range(program * steps, rows, programs * steps, num_stages=STAGES):
"""
_OLD_SUMS = """        b_y, b_rstd = _standardised(b_x, m_x, eps, size, centered)
        b_scale_part += b_grad * b_y
        b_shift_part += b_grad
        if p_weight is not None:
            b_grad *= 1 + tl.load(p_weight + i_column, mask=m_column, other=0.0).to(tl.float32)[None]
        b_grad_x = b_grad - b_y * (tl.sum(b_grad * b_y, 2) / size)[:, :, None]
        if centered:
            b_grad_x -= (tl.sum(b_grad, 2) / size)[:, :, None]
"""
_NEW_SUMS = """        b_shift_part += b_grad
        b_weighted = b_grad * b_weight
        if centered:
            b_x = tl.where(m_x, b_x - (tl.sum(b_x, 2) / size)[:, :, None], 0.0)
            b_squares, b_sum, b_dot = tl.reduce((b_x * b_x, b_weighted, b_weighted * b_x), 2, _add3)
        else:
            b_squares, b_dot = tl.reduce((b_x * b_x, b_weighted * b_x), 2, _add2)
        b_rstd = tl.rsqrt(b_squares / size + eps)
        b_y = b_x * b_rstd[:, :, None]
        b_scale_part += b_grad * b_y
        b_grad_x = b_weighted - b_y * (b_dot * b_rstd / size)[:, :, None]
        if centered:
            b_grad_x -= (b_sum / size)[:, :, None]
"""


def _norms() -> Iterator[Variant]:
    """One reduction in the place of two, the weight before the loop, loads in flight, and other tiles."""
    module, loop = "norms.triton", "    for first in range(program * steps, rows, programs * steps):\n"
    for stages in (1, 3):
        edits = (
            (loop, _WEIGHT_FIRST.replace("STAGES", str(stages))), (_OLD_SUMS, _NEW_SUMS),
            ("@triton.jit\ndef _standardised(", _SUMS),
        )  # fmt: skip
        for warps, steps in ((4, 1), (8, 1), (8, 2), (16, 2)):
            name = f"one reduction, {warps} warps, {steps} rows, {stages} stages"
            change = partial(sized, warps=warps, steps=steps)
            yield Variant("norm gradients", name, {"norms._gradients": module}, {module: edits}, change)


def _timestep_norms() -> Iterator[Variant]:
    kernels = {"timestep_norm.normalise_tiles": None, "timestep_norm.gradients": None}
    yield Variant("timestep norm", "2 warps", kernels, change=partial(sized, warps=2))


def _qk_scale_shifts() -> Iterator[Variant]:
    """The factors are loaded as tiles of the layout of z, so that nothing is converted in the loop."""
    module, name = "qk_scale_shift.triton", "qk_scale_shift._gradients"
    tail = "features: tl.constexpr, size: tl.constexpr"
    old = f'''{tail}):
    """Return the factors of a row of the result, (1, features)."""
    b_scale = tl.load(p_scale + row * features + i_head * size + i_s, mask=i_s < size, other=0.0)
    return ((1 + b_scale.to(tl.float32)) * factor)[None]
'''
    new = f"""{tail}, steps: tl.constexpr):
    i = tl.zeros([steps, 1], tl.int32) + (row * features + i_head * size + i_s).to(tl.int32)[None]
    b_scale = tl.load(p_scale + i, mask=tl.broadcast_to((i_s < size)[None], i.shape), other=0.0)
    return (1 + b_scale.to(tl.float32)) * factor
"""
    call = "i_s, i_head, factor, features, size{})"
    calls = [(f"_factor(p_scale, {row}, {call.format('')}", f"_factor(p_scale, {row}, {call.format(', steps')}")
             for row in (0, 1, 2, 3, "row")]  # fmt: skip
    tiles = ((old, new), *calls)
    loop = "for begin in range(i_part % programs * steps, length, programs * steps):"
    for stages in (1, 2):
        staged = loop.replace("range(", "tl.range(").replace("):", f", num_stages={stages}):")
        yield Variant(
            "query-key gradients", f"tiles, {stages} stages", {name: module}, {module: (*tiles, (loop, staged))}
        )


# ---- Attention, memory, head


def _chains() -> Iterator[Variant]:
    def change(launch: Launch, r: int, s: int, v: int | None, stages: int) -> Launch:
        keys, values, rows = launch.arguments["key_width"], launch.arguments["value_width"], launch.grid[1]
        launch = sized(launch, stages=stages, block_r=min(r, tile(keys)), block_s=min(s, tile(keys)))
        if v is None or launch.kernel.__name__ != "_chain_kernel":  # backward has a row of results per block
            return launch
        return dataclasses.replace(sized(launch, block_v=v), grid=(blocks(values, v), rows))

    kernels = {"working_memory._chain_kernel": None, "working_memory._chain_backward_kernel": None}
    for r, s, v, stages in ((256, 32, None, 3), (256, 64, None, 3), (256, 64, 16, 3)):
        yield Variant("memory chain", f"tiles {r}, {s}, {v or 'as before'}, {stages} stages", kernels,
                      change=partial(change, r=r, s=s, v=v, stages=stages))  # fmt: skip


def _scratches() -> Iterator[Variant]:
    for bits in (25, 27, 28):
        yield Variant("attention scratch", f"2^{bits} bytes", {}, constants=((triton_wide, "_SCRATCH", 2**bits),))


def _score_gradients() -> Iterator[Variant]:
    """The products of the outputs' gradients and the values are cuBLAS's; a kernel reads them."""
    module, name = "chunk_attention.triton_wide", "chunk_attention._score_grads_kernel"
    old = """        i_value = (i_row * (chunks + before) + i_chunk + before) * chunk_size + i_key
        b_ds = product_of_rows(
            p_grad, i_grad, p_v, i_value, m_key, value_width, operand_type, block_q, block_k, block_d
        )
"""
    new = """        window: tl.constexpr = 2 * chunk_size if previous else chunk_size
        i_dp = (i_block * chunk_size + i_place[:, None]) * window + i_key[None, :] + (window - chunk_size)
        b_ds = tl.load(p_grad + i_dp, mask=(i_place < chunk_size)[:, None] & m_key[None, :], other=0.0)
"""
    yield Variant("score gradients", "batched product", {name: module}, {module: ((old, new),)}, _with_products)


def _with_products(launch: Launch) -> Launch:
    """Compute the gradients of the weights of a piece, float32, which the kernel reads in the place of ``p_grad``."""
    a = launch.arguments
    count, chunk, window = a["p_weights"].shape
    v, shift = a["p_v"], a["before"] - (window // chunk - 1)
    values = v.as_strided(
        (v.shape[0], v.shape[1] // chunk - window // chunk + 1, window, v.shape[2]),
        (v.stride(0), chunk * v.stride(1), v.stride(1), 1),
    )  # fmt: skip
    grads, keys = (_blocks(x, a, count, by) for x, by in ((a["p_grad"].unflatten(1, (-1, chunk)), 0), (values, shift)))
    return sized(launch, p_grad=product(grads, keys.mT))


def _blocks(x: Tensor, a: Mapping[str, Any], count: int, shift: int) -> Tensor:
    """Return the blocks of a piece (count, …) of x (R, chunks, …)."""
    row, chunk = a["row"], a["chunk"] + shift
    return x[row : row + count, chunk] if a["row_step"] else x[row, chunk : chunk + count]


def _heads() -> Iterator[Variant]:
    for block, warps, registers in ((4096, 16, None), (8192, 32, 64)):
        yield Variant("loss", f"blocks of {block}, {warps} warps", {"loss._token": None},
                      change=partial(_head, block=block, warps=warps, registers=registers))  # fmt: skip


def _head(launch: Launch, block: int, warps: int, registers: int | None) -> Launch:
    block = min(block, tile(launch.arguments["vocabulary"], 1))
    return sized(launch, warps=warps, registers=registers, block=block)


# ---- Decoding


def _products_onto() -> Iterator[Variant]:
    def change(launch: Launch, inner: int, stages: int) -> Launch:
        return sized(launch, stages=stages, inner=min(inner, tile(launch.arguments["inputs"])))

    for inner, stages in ((256, 6), (512, 4)):
        yield Variant("decoder's products", f"{inner} inputs, {stages} stages", {"decoding.onto_kernel": None},
                      change=partial(change, inner=inner, stages=stages))  # fmt: skip


def _averages() -> Iterator[Variant]:
    module = "decoding.triton_average"
    shape = "tl.reshape(tl.load({}, mask=m_pair, other=0.0), shape)"

    def pair(pointer: str) -> str:
        return f"tl.split({shape.format(pointer)})"

    edits = (
        ("i_mode = tl.arange(0, modes_width)[None, None, :]", "i_pair = tl.arange(0, 2 * modes_width)[None, None, :]"),
        ("m_mode = m_x[:, :, None] & (i_mode < modes)", "m_pair = m_x[:, :, None] & (i_pair < 2 * modes)"),
        ("(2 * modes) + 2 * i_mode", "(2 * modes) + i_pair"),
        ("[:, :, None] + 2 * i_mode\n",
         "[:, :, None] + i_pair\n"
         "    shape: tl.constexpr = (i_feature.shape[0], i_feature.shape[1], modes_width, 2)\n"),
        ("q_real = tl.load(p_tables + i_table, mask=m_mode, other=0.0)", f"q_real, _ = {pair('p_tables + i_table')}"),
        ("q_imag = tl.load(p_tables + table + i_table + 1, mask=m_mode, other=0.0)",
         f"_, q_imag = {pair('p_tables + table + i_table')}"),
        ("b_in = tl.load(p_tables + 2 * table + i_table, mask=m_mode, other=0.0)",
         f"b_in, _ = {pair('p_tables + 2 * table + i_table')}"),
        ("h_real = tl.load(p_state + i_state, mask=m_mode, other=0.0)\n"
         "    h_imag = tl.load(p_state + i_state + 1, mask=m_mode, other=0.0)",
         f"h_real, h_imag = {pair('p_state + i_state')}"),
        ("tl.store(p_state + i_state, b_real, mask=m_mode)\n    tl.store(p_state + i_state + 1, b_imag, mask=m_mode)",
         "tl.store(p_state + i_state, tl.reshape(tl.join(b_real, b_imag), i_state.shape), mask=m_pair)"),
        ("out_real = tl.load(p_tables + 3 * table + i_table, mask=m_mode, other=0.0)\n"
         "    out_imag = tl.load(p_tables + 3 * table + i_table + 1, mask=m_mode, other=0.0)",
         f"out_real, out_imag = {pair('p_tables + 3 * table + i_table')}"),
    )  # fmt: skip
    yield Variant("decoder's moving average", "pairs", {"decoding.average_kernel": module}, {module: edits})


def without_barriers() -> Variant:
    """Return the decoder without barriers: only to learn whether it computes other numbers then."""
    average, mixer, pair = "decoding.triton_average", "decoding.triton_mixer", (("tl.debug_barrier()", "pass"),)
    kernels = {"decoding.average_kernel": average} | {
        f"decoding.{name}": mixer for name in ("heads_kernel", "mix_kernel", "enter_kernel")
    }
    return Variant("barriers", "none", kernels, {average: pair, mixer: pair})


OPERATORS = {
    "moving average": (_moving_averages, "moving average"), "norm gradients": (_norms, "RMS norm"),
    "timestep norm": (_timestep_norms, "timestep norm"), "query-key gradients": (_qk_scale_shifts, "qk-scale-shift"),
    "memory chain": (_chains, "working memory"), "score gradients": (_score_gradients, "chunk attention"),
    "attention scratch": (_scratches, "chunk attention"), "loss": (_heads, "head and loss"),
}  # fmt: skip
"""By family, the variants and the operator that shows them."""


def of_operators() -> Iterator[tuple[str, list[Variant]]]:
    """Yield the operator of each family with its variants."""
    for make, operator in OPERATORS.values():
        yield operator, list(make())


def of_decoding() -> list[Variant]:
    return [*_products_onto(), *_averages()]
