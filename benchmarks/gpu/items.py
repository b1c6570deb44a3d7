"""The items that ``quarter_hour.py`` measures, with sizes for a GPU and small sizes for ``--here``."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import decoding, kernel_times, training
from gpu.operators import ATTENTION, AVERAGE, Shape, forward_and_backward, measure, operator_of, operators, yardstick
from gpu.record import Record, Row, noted
from gpu.timing import DTYPE, Bench, rates
from gpu.training import LLAMA
from gpu.variants import OF_DECODING, OPERATORS, WITHOUT_BARRIERS, Variant, applied, of_family, won

from gecko.config import GeckoConfig
from gecko.models import ModelConfig

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sizes:
    bench: Bench
    shape: Shape
    """Operators are timed at this one,"""
    compared: Shape
    """and compared with float64 at this one."""
    model: str
    """The model that is trained and decoded,"""
    config: GeckoConfig
    """and its architecture."""
    trained: tuple[tuple[int, int], ...]
    """Rows and tokens of a row: long ones, several, one short one."""
    longest: int
    decoded: tuple[int, int]
    """Rows."""
    equal: tuple[int, int, int]
    """Rows, tokens and repetitions of the test of equal rows."""
    rates: tuple[int, int]
    product: tuple[int, int, int]
    losses: int = 20

    def shallow(self, **fields: Any) -> GeckoConfig:
        """Return the architecture with two layers."""
        return dataclasses.replace(self.config, num_layers=2, **fields)

    def equal_rows(self) -> GeckoConfig:
        return self.shallow(chunk_size=min(64, self.config.chunk_size))


def of_a_card(bench: Bench) -> Sizes:
    wide, config = GeckoConfig.preset("gecko-7b"), GeckoConfig.preset("gecko-1b")
    # Without recomputation, gecko-1b on 32,768 tokens takes 85 GB.
    long = (1, 32_768) if bench.memory > 100e9 else (2, 8_192)
    return Sizes(
        bench, Shape("gecko-7b", wide, 32_768), Shape("gecko-7b, 8,192 tokens", wide, 8_192), "gecko-1b", config,
        (long, (8, 4_096), (1, 4_096)), 131_072, (1, 32), (32, 200, 1_000), (2**29, 8_192), (32_768, 2_048, 6_144),
    )  # fmt: skip


def of_this_machine(bench: Bench) -> Sizes:
    """Return sizes that Triton's interpreter computes in seconds."""
    config = GeckoConfig(
        vocab_size=32, num_layers=2, model_dim=16, key_dim=16, value_dim=32, num_heads=1, ffn_dim=16, chunk_size=8,
        cema_modes=2, timestep_groups=2,
    )  # fmt: skip
    return Sizes(
        bench, Shape("small", config, 32), Shape("small, compared", config, 32), "small", config,
        ((1, 24), (2, 16), (1, 16)), 32, (1, 2), (2, 10, 2), (2**16, 64), (32, 16, 48), losses=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Item:
    name: str
    limit: float
    """Seconds after which it is given up."""
    results: Callable[[], Iterable[Row]]
    needs: float = 0.0
    """Bytes of the card's memory without which it is not tried."""


def one(measure: Callable[..., Row], *arguments: Any) -> Callable[[], list[Row]]:
    """Return what measures one result."""
    return lambda: [measure(*arguments)]


def first(s: Sizes, record: Record) -> list[Item]:
    """Return the items of the first command: what decides."""
    b, variants = s.bench, [x for family in OPERATORS for x in of_family(family)]
    compares = lru_cache(maxsize=1)(lambda name: yardstick(operator_of(name, s.compared, b)))
    return [
        Item("rates", 30, one(rates, b, *s.rates)),
        Item("equal rows", 40, partial(_equal_rows, s)),
        Item("equal rows without barriers", 40, partial(_equal_rows, s, WITHOUT_BARRIERS)),
        *(Item(f"variants: {x}", 20, one(_variant, s, compares, x)) for x in variants),
        Item("kernels of a step", 30, partial(_kernels, s)),
        Item("kernels of a step with the winners", 30, partial(_with_winners, record, partial(_kernels, s))),
        *(Item(f"training {rows} × {length:,}: {name}", 40, one(training.train, name, config, rows, length, b))
          for rows, length in s.trained for name, config in models(s)),
        *(Item(f"decoding {rows} rows", 30, one(_decoding, s, s.model, s.config, rows)) for rows in s.decoded),
        *(Item(f"decoding {rows} rows, {x}", 30, one(_decoding, s, s.model, s.config, rows, x))
          for rows in s.decoded for x in OF_DECODING),
        Item("decoding, wide", 20, one(_decoding, s, s.shape.name, s.shape.config, s.decoded[0])),
        *(Item(f"captured step {rows} × {length:,}: {name}", 40,
               partial(training.train_captured, name, config, rows, length, b, losses))
          for (rows, length), losses in zip(reversed(s.trained), (s.losses, 4, 4), strict=True)
          for name, config in models(s)[: 2 if losses == s.losses else 1]),
    ]  # fmt: skip


def second(s: Sizes, record: Record) -> list[Item]:
    """Return the items of the second command: the headline with the winners, correctness, and single questions."""
    b, short = s.bench, (s.shallow(), *s.trained[-1], s.bench)
    headline = (s.model, s.config, *s.trained[0], b)
    return [
        Item("rates", 30, one(rates, b, *s.rates)),
        Item("headline", 60, one(training.train, *headline)),
        Item("headline with the winners", 60,
             partial(_with_winners, record, lambda names: [training.train(*headline, names)])),
        Item("operators", 60, partial(_operators, s)),
        *(Item(f"tests: {file}", limit, partial(_tests, file)) for file, limit in TESTS.items()),
        *(Item(f"training, longest: {name}", 60, one(training.train, name, config, 1, s.longest, b), needs=60e9)
          for name, config in models(s)),
        Item("decoding, wide, many rows", 30, one(_decoding, s, s.shape.name, s.shape.config, s.decoded[1]), 129e9),
        *(Item(f"profile: {name}", 40, partial(_profile, s, name)) for name in PROFILED),
        Item("float8 product", 10, one(_float8, s)),
        Item("sharded on one rank", 30, one(training.sharded, *short)),
        Item("recomputation", 20, one(training.recomputed, *short)),
        Item("decoding in 8 bits", 20, one(decoding.measure_in_8_bits, s.model, s.config, s.decoded[0], b)),
        Item("compiled blocks", 120, one(training.with_compiled_blocks, *short)),
    ]  # fmt: skip


def models(s: Sizes) -> list[tuple[str, ModelConfig]]:
    return [(s.model, s.config), (f"{LLAMA}, equal to {s.model}", training.equal_llama(s.config))]


def _variant(s: Sizes, compares: Callable[[str], Callable[[], Row]], variant: Variant) -> Row:
    """Compare a variant, or the chosen form of its family, with the eager form, and time it."""
    name = OPERATORS[variant.family]
    with applied(variant):
        compared, timed = compares(name)(), measure(operator_of(name, s.shape, s.bench), s.shape.name, s.bench)
    return {**timed, **compared, "table": "variants", "family": variant.family, "form": variant.name}


def _operators(s: Sizes) -> Iterator[Row]:
    for timed, compared in zip(operators(s.shape, s.bench), operators(s.compared, s.bench), strict=True):
        yield {**measure(timed, s.shape.name, s.bench), **yardstick(compared)()}


def _kernels(s: Sizes, *form: str) -> Iterator[Row]:
    """Time the kernels of a step of one block and the head, on all tokens of the longest rows."""
    (rows, length), *_ = s.trained
    step = training.Steps.of(dataclasses.replace(s.config, num_layers=1), 1, rows * length, s.bench).gradients
    return kernel_times.measure(", ".join([s.model, f"{rows * length:,} tokens", *form]), step, s.bench)


def _with_winners(record: Record, results: Callable[[str], Iterable[Row]]) -> Iterator[Row]:
    """Measure with the variants that won; ``results`` gets their names."""
    winners = won(record.rows("variants"))
    with applied(*winners):
        yield from results(f"with {', '.join(map(str, winners)) or 'no variant'}")


def _decoding(s: Sizes, name: str, config: GeckoConfig, rows: int, *variants: Variant) -> Row:
    with applied(*variants):
        return decoding.measure(name, config, rows, s.bench, ", ".join(map(str, variants)))


def _equal_rows(s: Sizes, *variants: Variant) -> Iterator[Row]:
    with applied(*variants):
        yield from decoding.equal_rows(s.equal_rows(), *s.equal, s.bench, "without barriers: " if variants else "")


TESTS = {"test_capture.py": 30, "test_sizes.py": 60, "test_operators.py": 60, "test_models.py": 120}
"""Seconds that each file of tests/gpu may take."""


class _Reporter:
    """Plugin of pytest that keeps how each test ended."""

    def __init__(self, file: str) -> None:
        self.file, self.found = file, list[Row]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the test itself, and its setup or teardown if they do not pass."""
        if report.when == "call" or not report.passed:
            message = str(report.longrepr).strip().splitlines()[-1][:200] if report.failed else ""
            self.found.append({
                "table": "tests", "file": self.file, "test": report.nodeid.partition("::")[2],
                "outcome": report.outcome, "seconds": report.duration, "message": message,
            })  # fmt: skip


def _tests(file: str) -> Iterator[Row]:
    reporter = _Reporter(file)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "--override-ini", "addopts=--import-mode=importlib"]
    try:
        code = pytest.main([*options, str(ROOT / "tests/gpu" / file)], plugins=[reporter])
    finally:
        yield from reporter.found
    if code not in (0, 1, 5):
        raise RuntimeError(f"pytest must end with 0, 1 or 5; it ended with {code}.")


COUNTERS = (
    "gpu__time_duration.sum", "l1tex__data_bank_conflicts_pipe_lsu.sum", "l1tex__data_pipe_lsu_wavefronts.sum",
    "lts__t_bytes.sum.per_second", "lts__t_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "sm__throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip
PROFILED = {AVERAGE: "filter_kernel", ATTENTION: "_score_grads_kernel", "decoding": "onto_kernel"}


def _profile(s: Sizes, name: str) -> Iterator[Row]:
    """Count what one launch does to memory and caches, in a process of its own under the card's profiler."""
    tool, small = shutil.which("ncu"), not s.bench.is_card
    own = [sys.executable, str(Path(__file__).with_name("quarter_hour.py")), "--profile", name]
    if tool is None and not small:
        raise RuntimeError("the profiler ncu is not installed")
    options = ["--clock-control", "none", "--kernel-name", f"regex:^{PROFILED[name]}$", "--launch-skip", "1",
               "--launch-count", "1", "--csv", "--page", "raw", "--metrics", ",".join(COUNTERS)]  # fmt: skip
    command = [*([tool, *options] if tool else []), *own, *(["--here"] if small else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300 if small else 35)
    if ended.returncode:
        raise RuntimeError(f"the profiled process ended with {ended.returncode}: {ended.stderr.strip()[-200:]}")
    rows = list(csv.reader(line for line in ended.stdout.splitlines() if line.startswith('"')))
    for metric, unit, value in zip(*rows[:3], strict=False) if len(rows) > 2 else ():
        if metric in COUNTERS:
            yield noted(f"{PROFILED[name]}, {metric}", float(value.replace(",", "")), unit)


def profiled(s: Sizes, name: str) -> None:
    """Make the launches that ``_profile`` counts; the first ones fill caches."""
    if name == "decoding":
        _decoding(s, s.model, s.config, 1)
        return
    operator = operator_of(name, s.shape, s.bench)
    for _ in range(2):
        s.bench.once(partial(forward_and_backward, operator))


def _float8(s: Sizes) -> Row:
    rows, inner, outputs = s.product
    a, b = s.bench.random(rows, inner), s.bench.random(outputs, inner)
    exact = s.bench.seconds(lambda: a @ b.t(), queued=True).seconds
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    ones = [torch.ones(size, device=s.bench.device) for size in ((rows, 1), (1, outputs))]
    rounded = s.bench.seconds(lambda: torch._scaled_mm(a8, b8.t(), *ones, out_dtype=DTYPE), queued=True).seconds
    return noted("product in float8, times as fast as in bfloat16", exact / rounded, f"{rows} × {inner} × {outputs}")
