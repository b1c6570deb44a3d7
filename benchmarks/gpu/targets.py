"""Targets of the kernels on an H200-class card, and the measured values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    def timing(self, operator: str, form: str) -> Timing | None:
        found = (t for t in self.timings if (t.operator, t.form, t.shape) == (operator, form, SHAPE))
        return next((t for t in found if t.both is not None), None)

    def agreement(self, timing: Timing) -> Agreement | None:
        """Return the agreement of the dispatched operator with its eager form."""
        found = (a for a in self.agreements if a.operator == timing.operator and a.shape.startswith(timing.shape))
        return next(found, None) if timing.form == GECKO else None

    def training(self, model: str, length: int, rows: int = 1, form: str = "") -> Training | None:
        found = (t for t in self.trainings if (t.model, t.length, t.rows, t.form) == (model, length, rows, form))
        return next((t for t in found if t.speed is not None), None)

    def byte_limit(self, decoding: Decoding) -> float | None:
        """Return the bytes per second that a step reads and writes as a share of the copy rate."""
        return None if self.rates is None else decoding.bytes_moved / decoding.seconds / self.rates.copy

    def bandwidth(self, timing: Timing, backward: bool) -> float | None:
        """Return the floor's bytes per second as a share of the copy rate."""
        seconds = timing.both if backward else timing.forward
        numbers = timing.floor.numbers_both if backward else timing.floor.numbers_forward
        if seconds is None or self.rates is None:
            return None
        return numbers * self.element_size / seconds / self.rates.copy

    def products(self, timing: Timing, backward: bool) -> float | None:
        """Return the floor's FLOP/s as a share of the matrix rate."""
        seconds = timing.both if backward else timing.forward
        flops = timing.floor.flops_both if backward else timing.floor.flops_forward
        return None if seconds is None or self.rates is None else flops / seconds / self.rates.products


@dataclass(frozen=True)
class Target:
    what: str
    least: float
    unit: str
    find: Callable[[Results], float | None]

    def met(self, value: float) -> bool:
        return value >= self.least


def targets() -> Iterable[Target]:
    for operator, forward, both in ((AVERAGE, 0.20, 0.20), (TIMESTEP, 0.70, 0.60)):
        yield Target(f"{operator}, forward", forward, "of copy bandwidth", _share(operator, Results.bandwidth, False))
        yield Target(f"{operator}, with backward", both, "of copy bandwidth", _share(operator, Results.bandwidth, True))
    yield Target(f"{MIXING}, with backward", 0.55, "of the matrix rate", _share(MIXING, Results.products, True))
    yield Target(f"{MODEL}, training at 32,768", 0.50, "MFU", _utilisation)
    for (rows, length, form), least in SPEEDS.items():
        what = f"{MODEL}, training, {rows} × {length:,} {form}".rstrip()
        yield Target(what, least, "× Llama's tokens/s", _against_llama(rows, length, form))
    for model in (MODEL, SHAPE):
        for rows, share in ROWS.items():
            what = f"{model}, decoding {rows} {'row' if rows == 1 else 'rows'}"
            yield Target(what, share, "of the byte limit", _decoding(model, rows))


def _decoding(model: str, rows: int) -> Callable[[Results], float | None]:
    def find(results: Results) -> float | None:
        found = (d for d in results.decodings if (d.model, d.form, d.rows, d.variant) == (model, CAPTURED, rows, ""))
        return next(map(results.byte_limit, found), None)

    return find


def _share(
    operator: str, kind: Callable[[Results, Timing, bool], float | None], backward: bool
) -> Callable[[Results], float | None]:
    def find(results: Results) -> float | None:
        timing = results.timing(operator, GECKO)
        return None if timing is None else kind(results, timing, backward)

    return find


def _utilisation(results: Results) -> float | None:
    training = results.training(MODEL, 32_768)
    return None if training is None or results.rates is None else training.utilisation(results.rates.peak)


def _against_llama(rows: int, length: int, form: str) -> Callable[[Results], float | None]:
    def find(results: Results) -> float | None:
        ours = results.training(MODEL, length, rows, form)
        theirs = results.training(f"{LLAMA}, equal to {MODEL}", length, rows)
        if ours is None or theirs is None or ours.speed is None or theirs.speed is None:
            return None
        return ours.speed / theirs.speed

    return find
