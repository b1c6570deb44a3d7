"""Other forms of kernels, tried on a card beside the chosen ones: the fastest that is as right becomes the choice.

A variant edits the source of production kernels or changes their launches, so each stays beside
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

from gpu.kernel_times import kernel_name
from gpu.operators import GECKO, MEMORY
from gpu.record import Row

from gecko.ops.backends import dispatch
from gecko.ops.backends.dispatch import Launch, tile

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

    with patch.object(Launch, "run", run):
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


def _chain(launch: Launch, stages: int) -> Launch:
    """Return a chain of memories with tiles of 256 × 16."""
    keys = tile(launch.arguments["key_width"])
    return sized(launch, stages=stages, block_r=min(256, keys), block_s=min(16, keys))


_CHAIN = ("working_memory._chain_backward_kernel",)
_BARRIERS = {f"decoding.{name}": (("tl.debug_barrier()", "pass"),) for name in ("triton_mixer", "triton_rows")}

OPERATORS = {"memory chain": MEMORY}
"""By family, the operator that shows it."""
VARIANTS = [
    Variant("memory chain", f"back, 256 × 16, {stages} stages", _CHAIN, change=partial(_chain, stages=stages))
    for stages in (2, 3)
]
"""Those of operators."""
OF_DECODING = [
    Variant("values", "4 warps", ("decoding.mix_kernel",), change=partial(sized, warps=4)),
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
