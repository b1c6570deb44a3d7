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

from gpu.kernel_times import kernel_name
from gpu.operators import ATTENTION, AVERAGE, GECKO, HEAD, MEMORY, NORM, QUERY_KEY, TIMESTEP
from gpu.record import Row

from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch, blocks, tile
from gecko.ops.chunk_attention import triton_wide

FOLDER = Path(__file__).parents[2] / "build" / "variants"
"""Where edited modules are written: Triton reads the source of kernels from files."""
AHEAD = 0.97
"""Share of the time of the chosen form that a variant may take at most: less is more than the spread of two runs."""

Change = Callable[[Launch], Launch]
Edits = Mapping[str, Sequence[tuple[str, str]]]
"""By module below ``gecko.ops``, pairs of code that is there and of what replaces it everywhere."""


@dataclass(frozen=True)
class Variant:
    """Another form of some kernels, which are named as by ``kernel_name``."""

    family: str
    """Variants of one family exclude each other."""
    name: str
    kernels: Sequence[str] = ()
    edits: Edits = dataclasses.field(default_factory=dict)
    """Edits of the source of these kernels' modules and of the modules that they import."""
    change: Change = lambda launch: launch
    constants: tuple[tuple[Any, str, Any], ...] = ()
    """Objects, names and values of constants to replace."""

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"

    def of(self, launch: Launch) -> Launch:
        """Return the launch in this form."""
        if kernel_name(launch) not in self.kernels:
            return launch
        module = launch.kernel.fn.__module__.removeprefix("gecko.ops.")
        if module in self.edits:
            code = edited(self.edits, str(self), module)
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


def sized(launch: Launch, **sizes: Any) -> Launch:
    """Return the launch with other warps, stages or registers, and other arguments of the kernel."""
    own = {name: sizes.pop(name) for name in ("warps", "stages", "registers") if name in sizes}
    return dataclasses.replace(launch, arguments={**launch.arguments, **sizes}, **own)


# ---- The variants

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

_STAGED = "for begin in range(i_part % programs * steps, length, programs * steps):"


def _chain(launch: Launch, r: int, s: int, v: int | None) -> Launch:
    """Return a chain of memories with tiles of r × s, and of v values if that is given, in three stages."""
    keys, values, rows = launch.arguments["key_width"], launch.arguments["value_width"], launch.grid[1]
    launch = sized(launch, stages=3, block_r=min(r, tile(keys)), block_s=min(s, tile(keys)))
    if v is None or launch.kernel.__name__ != "_chain_kernel":  # backward has a row of results per block
        return launch
    return dataclasses.replace(sized(launch, block_v=v), grid=(blocks(values, v), rows))


def _head(launch: Launch, block: int, warps: int) -> Launch:
    block = min(block, tile(launch.arguments["vocabulary"], 1))
    return sized(launch, warps=warps, registers=128, block=block)


def _row(launch: Launch, inner: int) -> Launch:
    """Return a product of one row with other tiles."""
    inner = min(inner, tile(launch.arguments["inputs"]))
    return sized(launch, inner=inner) if launch.arguments["many"] == 1 else launch


def _columns(launch: Launch, factor: int) -> Launch:
    """Return the sum of values with tiles of the same size that are wider."""
    given, (rows, heads, parts) = launch.arguments, launch.grid
    changed = {"columns": given["columns"] * factor, **{x: given[x] // factor for x in ("slots", "rows")}}
    return dataclasses.replace(sized(launch, **changed), grid=(rows, heads, blocks(parts, factor)))


_FORWARD, _BACKWARD = "cema.triton_forward", "cema.triton_backward"
_AVERAGES = ("cema.filter_kernel", "cema.gradients_kernel")
_TIMESTEPS = ("timestep_norm.normalise_tiles", "timestep_norm.gradients")
_CHAINS = ("working_memory._chain_kernel", "working_memory._chain_backward_kernel")
_BARRIERS = {
    f"decoding.{name}": (("tl.debug_barrier()", "pass"),) for name in ("triton_average", "triton_heads", "triton_mixer")
}  # fmt: skip

OPERATORS = {
    "moving average": AVERAGE, "norm gradients": NORM, "timestep norm": TIMESTEP, "query-key gradients": QUERY_KEY,
    "memory chain": MEMORY, "attention scratch": ATTENTION, "loss": HEAD,
}  # fmt: skip
"""By family, the operator that shows it."""
VARIANTS = [
    Variant("moving average", "rounded into the state", _AVERAGES, {_FORWARD: _ROUNDED_INTO_STATE, _BACKWARD: ()}),
    Variant("moving average", "float16", _AVERAGES[:1], {_FORWARD: _FLOAT16}),
    *(
        Variant("norm gradients", f"{warps} warps, {steps} rows", ("norms._gradients",),
                change=partial(sized, warps=warps, steps=steps))
        for warps, steps in ((4, 1), (8, 2), (16, 2))
    ),
    Variant("timestep norm", "2 warps", _TIMESTEPS, change=partial(sized, warps=2)),
    Variant("query-key gradients", "2 stages", ("qk_scale_shift._gradients",), {"qk_scale_shift.triton": (
        (_STAGED, _STAGED.replace("range(", "tl.range(").replace("):", ", num_stages=2):")),
    )}),
    *(
        Variant("memory chain", f"tiles {r}, {s}, {v or 'as before'}, 3 stages", _CHAINS,
                change=partial(_chain, r=r, s=s, v=v))
        for r, s, v in ((256, 32, None), (256, 64, None), (256, 64, 16))
    ),
    *(
        Variant("attention scratch", f"2^{bits} bytes", constants=((triton_wide, "_SCRATCH", 2**bits),))
        for bits in (25, 27, 28)
    ),
    *(
        Variant("loss", f"blocks of 4096, {warps} warps", ("loss._token",),
                change=partial(_head, block=4096, warps=warps))
        for warps in (8, 16)
    ),
]  # fmt: skip
"""Those of operators."""
_PRODUCTS = [f"decoding.{name}_kernel" for name in ("project", "gated", "onto")]
OF_DECODING = [
    Variant("products of a row", "2048 inputs", _PRODUCTS, change=partial(_row, inner=2048)),
    Variant("products of a row", "in registers", _PRODUCTS, {"decoding.triton_products": (
        ("num_stages=3", "num_stages=1"),
    )}),
    Variant("values", "4 warps", ("decoding.mix_kernel",), change=partial(sized, warps=4)),
    Variant("values", "twice the columns", ("decoding.mix_kernel",), change=partial(_columns, factor=2)),
    Variant("keys", "96 registers", ("decoding.heads_kernel",), change=partial(sized, registers=96)),
]  # fmt: skip
WITHOUT_BARRIERS = Variant(
    "barriers", "none", [f"decoding.{name}_kernel" for name in ("average", "heads", "mix", "enter")], _BARRIERS
)
"""Only to learn whether the decoder computes other numbers then."""


def of_family(family: str) -> list[Variant]:
    """Return the chosen form, and the variants of a family."""
    return [Variant(family, GECKO), *(x for x in VARIANTS if x.family == family)]


def won(found: Sequence[Row]) -> list[Variant]:
    """Return the winning variant of each family that has one: the fastest that is as right as the eager form."""
    winners = []
    for family in OPERATORS:
        both = {x["form"]: x["seconds"][1] for x in found if x["family"] == family}
        right = [x["form"] for x in found if x["family"] == family and x["wrong"] is False]
        best = min(right, key=both.__getitem__, default=GECKO)
        if best != GECKO and both[best] <= AHEAD * both.get(GECKO, 0.0):
            winners += [x for x in of_family(family) if x.name == best]
    return winners
