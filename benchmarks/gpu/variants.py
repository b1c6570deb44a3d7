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
from unittest.mock import Mock, patch

from gpu.steps import kernel_name

from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention import triton_wide

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
    # The copy registers no operators: PyTorch would destroy those of the same names, and calls of them would read freed
    # memory. Only its kernels are used.
    with patch.object(dispatch, "custom_op", Mock()):
        spec.loader.exec_module(sys.modules[own])
    return sys.modules[own]


def sized(launch: Launch, *, warps: int | None = None, stages: int | None = None, registers: int | None = None,
          **arguments: Any) -> Launch:  # fmt: skip
    """Return the launch with other sizes; None leaves a size as it is."""
    given = {"warps": warps, "stages": stages, "registers": registers}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(launch, arguments={**launch.arguments, **arguments}, **given)


# ---- Moving average

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
    for name, edits, both in (("rounded into the state", _ROUNDED_INTO_STATE, True), ("float16", _FLOAT16, False)):
        kernels = {"cema.filter_kernel": forward} | ({"cema.gradients_kernel": backward} if both else {})
        yield Variant("moving average", name, kernels, {forward: edits, backward: ()})


# ---- Norms


def _norms() -> Iterator[Variant]:
    for warps, steps in ((4, 1), (8, 2), (16, 2)):
        change = partial(sized, warps=warps, steps=steps)
        yield Variant("norm gradients", f"{warps} warps, {steps} rows", {"norms._gradients": None}, change=change)


def _timestep_norms() -> Iterator[Variant]:
    kernels = {"timestep_norm.normalise_tiles": None, "timestep_norm.gradients": None}
    yield Variant("timestep norm", "2 warps", kernels, change=partial(sized, warps=2))


def _qk_scale_shifts() -> Iterator[Variant]:
    module, name = "qk_scale_shift.triton", "qk_scale_shift._gradients"
    loop = "for begin in range(i_part % programs * steps, length, programs * steps):"
    staged = loop.replace("range(", "tl.range(").replace("):", ", num_stages=2):")
    yield Variant("query-key gradients", "2 stages", {name: module}, {module: ((loop, staged),)})


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


def _heads() -> Iterator[Variant]:
    for block, warps in ((4096, 8), (4096, 16)):
        yield Variant("loss", f"blocks of {block}, {warps} warps", {"loss._token": None},
                      change=partial(_head, block=block, warps=warps))  # fmt: skip


def _head(launch: Launch, block: int, warps: int) -> Launch:
    block = min(block, tile(launch.arguments["vocabulary"], 1))
    return sized(launch, warps=warps, registers=128, block=block)


# ---- Decoding


def _products_onto() -> Iterator[Variant]:
    def change(launch: Launch, inner: int, stages: int) -> Launch:
        return sized(launch, stages=stages, inner=min(inner, tile(launch.arguments["inputs"])))

    for inner, stages in ((128, 4), (256, 6)):
        yield Variant("decoder's products", f"{inner} inputs, {stages} stages", {"decoding.onto_kernel": None},
                      change=partial(change, inner=inner, stages=stages))  # fmt: skip


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
    "memory chain": (_chains, "working memory"), "attention scratch": (_scratches, "chunk attention"),
    "loss": (_heads, "head and loss"),
}  # fmt: skip
"""By family, the variants and the operator that shows them."""


def of_operators() -> Iterator[tuple[str, list[Variant]]]:
    """Yield the operator of each family with its variants."""
    for make, operator in OPERATORS.values():
        yield operator, list(make())


def of_decoding() -> list[Variant]:
    return list(_products_onto())
