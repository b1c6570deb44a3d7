"""Targets of the kernels on an H200-class card, and the measured values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpu.decoding import CAPTURED, Decoding
from gpu.operators import AVERAGE, GECKO, MIXING, TIMESTEP, Agreement, Timing
from gpu.timing import Rates
from gpu.training import CAPTURED_STEP, LLAMA, Training

SHAPE = "gecko-7b"
"""Shape of the operators' targets: its width, a row of 32,768 tokens, bf16."""
MODEL = "gecko-1b"
SPEEDS = {(1, 4_096, CAPTURED_STEP): 1.2, (8, 4_096, ""): 0.9, (1, 32_768, ""): 1.5, (1, 131_072, ""): 3.0}
"""Target speed relative to an eager Llama, by rows, tokens per row and form."""
ROWS = {1: 0.56, 32: 0.69}
"""Target share of the byte limit in decoding, by rows."""


@dataclass(frozen=True)
class Results:
    """All results of one card."""

    rates: Rates | None
    element_size: int
    timings: list[Timing]
    agreements: list[Agreement]
    trainings: list[Training]
    decodings: list[Decoding]

    def agreement(self, timing: Timing) -> Agreement | None:
        """Return the agreement of the dispatched operator with its eager form."""
        found = (a for a in self.agreements if a.operator == timing.operator and a.shape.startswith(timing.shape))
        return next(found, None) if timing.form == GECKO else None

    def speed(self, model: str, rows: int, length: int, form: str = "") -> float | None:
        """Return tokens/s."""
        found = (t for t in self.trainings if (t.model, t.rows, t.length, t.form) == (model, rows, length, form))
        return next((t.speed for t in found if t.speed is not None), None)

    def byte_limit(self, decoding: Decoding) -> float | None:
        """Return the bytes per second that a step reads and writes as a share of the copy rate."""
        return None if self.rates is None else decoding.bytes_moved / decoding.seconds / self.rates.copy

    def bandwidth(self, timing: Timing, backward: bool) -> float | None:
        """Return the floor's bytes per second as a share of the copy rate."""
        numbers = timing.floor.numbers_both if backward else timing.floor.numbers_forward
        return self._share(timing, backward, numbers * self.element_size, self.rates and self.rates.copy)

    def products(self, timing: Timing, backward: bool) -> float | None:
        """Return the floor's FLOP/s as a share of the matrix rate."""
        flops = timing.floor.flops_both if backward else timing.floor.flops_forward
        return self._share(timing, backward, flops, self.rates and self.rates.products)

    def _share(self, timing: Timing, backward: bool, amount: float, rate: float | None) -> float | None:
        seconds = timing.both if backward else timing.forward
        return None if seconds is None or rate is None else amount / seconds / rate


@dataclass(frozen=True)
class Target:
    what: str
    least: float
    unit: str
    value: float | None
    """Measured."""


def targets(results: Results) -> Iterator[Target]:
    of = {t.operator: t for t in results.timings if (t.form, t.shape) == (GECKO, SHAPE) and t.both is not None}
    for operator, *least in ((AVERAGE, 0.20, 0.20), (TIMESTEP, 0.70, 0.60)):
        for backward, what in ((False, "forward"), (True, "with backward")):
            value = results.bandwidth(of[operator], backward) if operator in of else None
            yield Target(f"{operator}, {what}", least[backward], "of copy bandwidth", value)
    value = results.products(of[MIXING], True) if MIXING in of else None
    yield Target(f"{MIXING}, with backward", 0.55, "of the matrix rate", value)
    found = (t for t in results.trainings if (t.model, t.length, t.form) == (MODEL, 32_768, "") and t.speed is not None)
    value = next((t.utilisation(results.rates.peak) for t in found if results.rates), None)
    yield Target(f"{MODEL}, training at 32,768", 0.50, "MFU", value)
    for (rows, length, form), least_speed in SPEEDS.items():
        ours = results.speed(MODEL, rows, length, form)
        theirs = results.speed(f"{LLAMA}, equal to {MODEL}", rows, length)
        what = f"{MODEL}, training, {rows} × {length:,} {form}".rstrip()
        yield Target(what, least_speed, "× Llama's tokens/s", ours / theirs if ours and theirs else None)
    for model in (MODEL, SHAPE):
        for rows, share in ROWS.items():
            wanted = (model, CAPTURED, rows, "")
            decoded = (d for d in results.decodings if (d.model, d.form, d.rows, d.variant) == wanted)
            what = f"{model}, decoding {rows} {'row' if rows == 1 else 'rows'}"
            yield Target(what, share, "of the byte limit", next(map(results.byte_limit, decoded), None))
