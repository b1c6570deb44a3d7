"""Items that the quarter hour measures; each is a generator of results, at the sizes of a card or small ones."""

from __future__ import annotations

import copy
import csv
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gpu import decoding, kernel_times
from gpu.operators import AVERAGE, GECKO, Operator, Yardstick, forward_and_backward, measure, operators
from gpu.record import TODAY, Noted, Record, Result, Tested, Tried
from gpu.shapes import Shape
from gpu.steps import Step
from gpu.timing import Bench, Rates, why
from gpu.training import CAPTURED_STEP, LLAMA, Steps, Training, captured, count, equal_llama, train
from gpu.variants import OPERATORS, Variant, applied, of_decoding, without_barriers
from gpu.winners import won
from torch.distributed.device_mesh import init_device_mesh

from gecko import Gecko
from gecko.config import GeckoConfig
from gecko.inference.packed_weights import PackedWeights
from gecko.inference.prefill import inference
from gecko.models import ModelConfig
from gecko.ops.decoding.weights import Weights
from gecko.parallel.sharding import shard_model
from gecko.train.model import compile_block
from gecko.train.throughput import flops_per_token

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

    @property
    def small(self) -> bool:
        return self.bench.device.type == "cpu"

    def shallow(self, **fields: Any) -> GeckoConfig:
        """Return the architecture with two layers."""
        return dataclasses.replace(self.config, num_layers=2, **fields)


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
    results: Callable[[], Iterator[Result]]
    needs: float = 0.0
    """Bytes of the card's memory without which it is not tried."""


def first(s: Sizes, record: Record) -> list[Item]:
    """Return the items of the first command: what decides."""
    winners = partial(_winners, s, record)
    return [
        Item("rates", 30, lambda: iter([Rates.measure(s.bench, *s.rates)])),
        Item("equal rows", 40, partial(_equal_rows, s)),
        Item("equal rows without barriers", 40, partial(_equal_rows, s, (without_barriers(),))),
        *(Item(f"variants: {family}", 20, partial(_variants, s, family)) for family in OPERATORS),
        Item("kernels of a step", 30, lambda: kernel_times.measure(_step(s), s.bench)),
        Item("kernels of a step with the winners", 30, partial(_kernels, s, winners)),
        *(Item(f"training {rows} × {length:,}", 40, partial(_trainings, s, rows, length))
          for rows, length in s.trained),
        Item("captured step", 40, partial(_captured, s)),
        *(Item(f"decoding {rows} rows", 30, partial(_decodings, s, rows)) for rows in s.decoded),
        Item("decoding, wide", 20, lambda: iter([_decoding(s, s.shape.name, s.shape.config, s.decoded[0])])),
    ]  # fmt: skip


def second(s: Sizes, record: Record) -> list[Item]:
    """Return the items of the second command: the headline with the winners, correctness, and single questions."""
    long, *_ = s.trained
    winners = partial(_winners, s, record)
    names = (AVERAGE, "chunk attention", "decoding")
    return [
        Item("rates", 30, lambda: iter([Rates.measure(s.bench, *s.rates)])),
        Item("headline", 60, partial(_headline, s, winners, *long)),
        Item("operators", 60, partial(_operators, s)),
        *(Item(f"tests: {file}", 60, partial(_tests, file)) for file in ("test_sizes.py", "test_operators.py")),
        Item("training, longest", 60, partial(_trainings, s, 1, s.longest), needs=60e9),
        Item("decoding, wide, many rows", 30, needs=129e9,
             results=lambda: iter([_decoding(s, s.shape.name, s.shape.config, s.decoded[1])])),
        *(Item(f"profile: {name}", 40, partial(_profile, s, name)) for name in names),
        Item("float8 product", 10, partial(_float8, s)),
        Item("sharded on one rank", 30, partial(_sharded, s)),
        Item("recomputation", 20, partial(_recomputation, s)),
        Item("decoding in 8 bits", 20, partial(_in_8_bits, s)),
        Item("compiled blocks", 120, partial(_compiled, s)),
    ]  # fmt: skip


def _winners(s: Sizes, record: Record) -> list[Variant]:
    return won(list(record.results(Tried)), str(s.bench.dtype).removeprefix("torch."))


# ---- Operators


def operator_of(name: str, shape: Shape, bench: Bench) -> Operator:
    return next(operator for operator in operators(shape, bench) if operator.name == name)


def _variants(s: Sizes, family: str) -> Iterator[Result]:
    """Compare the chosen form and every variant with the eager form, and time them."""
    make, name = OPERATORS[family]
    yardstick = Yardstick.of(operator_of(name, s.compared, s.bench))
    timed = operator_of(name, s.shape, s.bench)
    for variant in (None, *make()):
        tried = Tried(name, family, variant.name if variant else TODAY)
        try:
            with applied(*([variant] if variant else [])):
                agreement = yardstick.compare(s.compared.name)
                timing = measure(timed, GECKO, s.shape.name, s.bench)
        except Exception as error:
            yield dataclasses.replace(tried, reason=why(error))
        else:
            yield dataclasses.replace(
                tried, agreement=agreement, seconds=timing.both, reason=timing.reason or agreement.reason
            )
        s.bench.check()


def _operators(s: Sizes) -> Iterator[Result]:
    for operator in operators(s.shape, s.bench):
        yield measure(operator, GECKO, s.shape.name, s.bench)
        s.bench.check()
    for operator in operators(s.compared, s.bench):
        yield Yardstick.of(operator).compare(s.compared.name)


def _step(s: Sizes) -> Step:
    rows, length = s.trained[0]
    return Step(s.model, rows * length, s.config)


def _kernels(s: Sizes, winners: Callable[[], list[Variant]]) -> Iterator[Result]:
    chosen = winners()
    with applied(*chosen):
        for time in kernel_times.measure(_step(s), s.bench):
            yield dataclasses.replace(time, step=f"{time.step}, with {', '.join(map(str, chosen)) or 'no variant'}")


# ---- Training


def _models(s: Sizes) -> list[tuple[str, ModelConfig]]:
    return [(s.model, s.config), (f"{LLAMA}, equal to {s.model}", equal_llama(s.config))]


def _trainings(s: Sizes, rows: int, length: int) -> Iterator[Result]:
    for name, config in _models(s):
        yield train(name, config, length, s.bench, rows)


def _headline(s: Sizes, winners: Callable[[], list[Variant]], rows: int, length: int) -> Iterator[Result]:
    chosen = winners()
    yield train(s.model, s.config, length, s.bench, rows)
    with applied(*chosen):
        form = f"with {', '.join(map(str, chosen)) or 'no variant'}"
        yield train(s.model, s.config, length, s.bench, rows, form)


def _captured(s: Sizes) -> Iterator[Result]:
    """Time steps whose forward and backward are one graph, and compare their losses with those of eager steps."""
    rows, length = s.trained[-1]
    for name, config in _models(s):
        s.bench.reset_peak()
        losses = []
        for capture in (False, True):
            steps = Steps.of(config, rows, length, s.bench, "none")
            gradients = captured(steps, s.bench.device) if capture else steps.gradients
            losses.append(_losses(steps, gradients, s.losses))
        yield Noted(f"{name}: largest difference of {s.losses} losses, captured and eager", _largest(*losses), "nats")

        def step(gradients: Callable[[], Any] = gradients, steps: Steps = steps) -> None:
            gradients()
            steps.update()

        seconds, flops = s.bench.seconds(step).seconds, flops_per_token(config, length)
        yield Training(name, count(config), length, flops, "none", seconds, s.bench.peak(), rows, CAPTURED_STEP)


def _losses(steps: Steps, gradients: Callable[[], torch.Tensor], number: int) -> list[float]:
    found = []
    for _ in range(number):
        found.append(float(gradients()))
        steps.update()
    return found


def _largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# ---- Decoding


def _decoding(s: Sizes, name: str, config: GeckoConfig, rows: int, *variants: Variant) -> decoding.Decoding:
    s.bench.reset_peak()
    with applied(*variants):
        which = ", ".join(str(x) for x in variants)
        return decoding.measure(name, config, rows, s.bench, which)


def _decodings(s: Sizes, rows: int) -> Iterator[Result]:
    for variants in ((), *((x,) for x in of_decoding())):
        yield _decoding(s, s.model, s.config, rows, *variants)


def _equal_rows(s: Sizes, variants: tuple[Variant, ...] = ()) -> Iterator[Result]:
    """Decode equal rows over several ends of chunks, and one step again and again from one state: bit for bit."""
    rows, tokens, again = s.equal
    name = "without barriers: " if variants else ""
    config = s.shallow(chunk_size=min(64, s.config.chunk_size))
    with applied(*variants):
        torch.manual_seed(0)
        with s.bench.device:
            model = Gecko(config).to(s.bench.dtype).eval()
        state = decoding.state_at(model, rows, 0)
        text = torch.randint(config.vocab_size, (tokens + 1,)).tolist()
        with inference(model), torch.no_grad():
            network: Any = PackedWeights(model, "triton").with_states(state)
            unequal = 0
            for token in text[:-1]:
                logits = network.step([token] * rows)
                state.clock.position.add_(1)
                unequal += not logits.equal(logits[:1].expand_as(logits))
            yield Noted(f"{name}steps of {tokens} whose {rows} equal rows got different logits", unequal, "steps")
            floats = [x for x in state.tensors().values() if x.is_floating_point()]
            apart = sum(not x.equal(x[:1].expand_as(x)) for x in floats)
            yield Noted(f"{name}of {len(floats)} states, those that differ between equal rows", apart, "states")
            yield Noted(f"{name}of {again} equal steps, those with other logits or states than the first",
                        _changed(network, state, [text[-1]] * rows, again), "steps")  # fmt: skip


def _changed(network: Any, state: Any, tokens: list[int], again: int) -> int:
    """Make a step ``again`` times from one state; return how often logits or states were not those of the first."""
    tensors = [x for name, x in state.tensors().items() if not name.startswith("clock")]
    before, wanted, changed = [x.clone() for x in tensors], None, 0
    for _ in range(again):
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
        network.buffers.position.fill_(int(state.clock.position[0]))
        network.buffers.token.fill_(tokens[0])
        network.replay(len(tokens))
        found = [network.buffers.logits.clone(), *(x.clone() for x in tensors)]
        wanted = found if wanted is None else wanted
        changed += not all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    return changed


def _in_8_bits(s: Sizes) -> Iterator[Result]:
    with in_8_bits():
        yield decoding.measure(s.model, s.config, s.decoded[0], s.bench, "8 bits")


@contextmanager
def in_8_bits() -> Iterator[None]:
    """Within the context, decoders have the matrices of blocks in 8 bits, with a scale per output."""
    kept = PackedWeights.__init__

    def packed(self: Any, *arguments: Any) -> None:
        kept(self, *arguments)
        self._layers = [{name: _quantized(x) for name, x in layer.items()} for layer in self._layers]

    with patch.object(PackedWeights, "__init__", packed):
        yield


def _quantized(x: Any) -> Any:
    if not isinstance(x, Weights):
        return x
    scale = x.weight.float().abs().amax(1).clamp(min=1e-8) / 127
    return Weights((x.weight.float() / scale[:, None]).round().to(torch.int8), scale, x.bias)


# ---- Tests and single questions


class _Reporter:
    """Plugin of pytest that keeps how each test ended."""

    def __init__(self, file: str) -> None:
        self.file, self.found = file, list[Tested]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the test itself, and its setup or teardown if they do not pass."""
        if report.when == "call" or not report.passed:
            message = str(report.longrepr).strip().splitlines()[-1][:200] if report.failed else ""
            name = report.nodeid.partition("::")[2]
            self.found.append(Tested(self.file, name, report.outcome, report.duration, message))


def _tests(file: str) -> Iterator[Result]:
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
PROFILED = {AVERAGE: "filter_kernel", "chunk attention": "_score_grads_kernel", "decoding": "onto_kernel"}


def _profile(s: Sizes, name: str) -> Iterator[Result]:
    """Count what one launch does to memory and caches, in a process of its own under the card's profiler."""
    tool = shutil.which("ncu")
    own = [sys.executable, str(Path(__file__).with_name("quarter_hour.py")), "--profile", name]
    if s.small:
        own.append("--here")
    if tool is None and not s.small:
        raise RuntimeError("the profiler ncu is not installed")
    options = ["--clock-control", "none", "--kernel-name", f"regex:^{PROFILED[name]}$", "--launch-skip", "1",
               "--launch-count", "1", "--csv", "--page", "raw", "--metrics", ",".join(COUNTERS)]  # fmt: skip
    command = own if tool is None else [tool, *options, *own]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=35 if not s.small else 300)
    if ended.returncode:
        raise RuntimeError(f"the profiled process ended with {ended.returncode}: {ended.stderr.strip()[-200:]}")
    rows = list(csv.reader(line for line in ended.stdout.splitlines() if line.startswith('"')))
    for metric, unit, value in zip(*rows[:3], strict=False) if len(rows) > 2 else ():
        if metric in COUNTERS:
            yield Noted(f"{PROFILED[name]}, {metric}", float(value.replace(",", "")), unit)


def profiled(s: Sizes, name: str) -> None:
    """Make the launches that ``_profile`` counts; the first ones fill caches."""
    if name == "decoding":
        _decoding(s, s.model, s.config, 1)
        return
    operator = operator_of(name, s.shape, s.bench)
    for _ in range(2):
        forward_and_backward(operator)
    s.bench.check()


def _float8(s: Sizes) -> Iterator[Result]:
    rows, inner, outputs = s.product
    a, b = s.bench.random(rows, inner), s.bench.random(outputs, inner)
    exact = s.bench.seconds(lambda: a @ b.t(), queued=True).seconds
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    ones = [torch.ones(size, device=s.bench.device) for size in ((rows, 1), (1, outputs))]
    rounded = s.bench.seconds(lambda: torch._scaled_mm(a8, b8.t(), *ones, out_dtype=s.bench.dtype), queued=True).seconds
    yield Noted("product in float8, times as fast as in bfloat16", exact / rounded, f"{rows} × {inner} × {outputs}")


def _sharded(s: Sizes) -> Iterator[Result]:
    """Compare losses of steps of a model that is sharded on a world of one rank with those of a plain one."""
    rows, length = s.trained[-1]
    config, device = s.shallow(), s.bench.device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, losses = init_device_mesh(device.type, (1,)), []
        for shards in (False, True):
            steps = Steps.of(config, rows, length, s.bench, "none")
            if shards:
                shard_model(steps.model, mesh, bfloat16=s.bench.dtype == torch.bfloat16)
                steps = steps.again()
            losses.append(_losses(steps, steps.gradients, 3))
    finally:
        dist.destroy_process_group()
    yield Noted("largest difference of 3 losses, sharded on one rank and plain", _largest(*losses), "nats")


def _recomputation(s: Sizes) -> Iterator[Result]:
    """Compare the gradients of a model that recomputes all activations with those of one that keeps them."""
    rows, length = s.trained[-1]
    found = []
    for checkpointing in ("none", "full"):
        steps = Steps.of(s.shallow(), rows, length, s.bench, checkpointing)  # type: ignore[arg-type]
        steps.gradients()
        found.append([x.grad for x in steps.model.parameters() if x.grad is not None])
    worst = max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(*found, strict=True))
    yield Noted("largest relative difference of a gradient, recomputed and kept", worst, "")


def _compiled(s: Sizes) -> Iterator[Result]:
    rows, length = s.trained[-1]
    steps = Steps.of(s.shallow(), rows, length, s.bench, "none")
    plain = s.bench.seconds(steps.gradients).seconds
    compiled = copy.copy(steps)
    for block in compiled.model.blocks:
        compile_block(block, **({"backend": "aot_eager"} if s.small else {}))
    yield Noted(
        "step with compiled blocks, of the time without", s.bench.seconds(compiled.gradients).seconds / plain, ""
    )
