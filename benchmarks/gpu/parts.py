"""Measurements as parts of tasks; each task can fail alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gpu import activations, decoding, kernel_times, warm_cache
from gpu.operators import measure_compiled, measure_eager, measure_kernels, operators
from gpu.peers import peers
from gpu.reading import positions
from gpu.record import Record, Result
from gpu.shapes import Shape
from gpu.steps import Step
from gpu.suites import run_tests
from gpu.sweep import places, sweep
from gpu.targets import LENGTHS, MODEL, ROWS, SHAPE
from gpu.timing import Bench, Rates, why
from gpu.training import LLAMA, equal_llama, train

from gecko.config import GeckoConfig

SMALLEST = "gecko-125m"
FAR = [1_000, 10_000, 100_000, 1_000_000]
RATES = "rates"
PRESETS = ("gecko-7b", "gecko-1b", "gecko-125m", "gecko-15m", "gecko-4m", "tiny", "megalodon-tiny")
"""Models of ``tests/gpu/test_sizes.py``; those whose kernels take longest to compile come first."""
LONG, WIDE = 60e9, 129e9
"""Bytes that training gecko-1b on a row of 131,072 tokens needs, with full recomputation, and decoding 32 rows of
gecko-7b."""


@dataclass(frozen=True)
class Task:
    """A unit of measurement that fails as a whole; its iterator measures on demand."""

    name: str
    results: Iterator[Result]


@dataclass(frozen=True)
class Part:
    tasks: Callable[[Bench], Iterator[Task]]
    asked: bool = False
    """Whether the part is measured only if it is named."""
    needs: float = 0.0
    """Bytes of the card's memory without which nothing of the part is tried."""

    def refused(self, bench: Bench) -> str:
        """Return why the part cannot be measured on this card, or ""."""
        if bench.memory >= self.needs:
            return ""
        return f"needs a card with {self.needs / 1e9:.0f} GB; this one has {bench.memory / 1e9:.0f} GB"


def full() -> dict[str, Part]:
    """Return all parts in the order of measurement: those that the targets need come first."""
    shapes = {name: Shape(name, GeckoConfig.preset(name), 32_768) for name in (SHAPE, MODEL, SMALLEST)}
    return {
        RATES: Part(partial(_rates, 2**29, 8_192)),
        "warm:tests": Part(_warm_tests),
        f"warm:operators:{SHAPE}": Part(partial(_warm_operators, [SHAPE, MODEL], 32_768)),
        "tests:sizes": Part(partial(_tests, "test_sizes.py")),
        "tests:models": Part(partial(_tests, "test_models.py")),
        f"operators:{SHAPE}": Part(partial(_operators, shapes[SHAPE])),
        f"operators:{MODEL}": Part(partial(_operators, shapes[MODEL])),
        f"warm:training:{MODEL}": Part(partial(_warm_training, MODEL, list(LENGTHS))),
        f"warm:sweep:{MODEL}": Part(partial(_warm_sweep, MODEL, 32_768)),
        f"training:{MODEL}": Part(partial(_trainings, MODEL, list(LENGTHS)[:2])),
        f"training:{MODEL}:long": Part(partial(_trainings, MODEL, list(LENGTHS)[2:]), needs=LONG),
        f"kernels:{MODEL}": Part(partial(_kernels, MODEL, 32_768)),
        f"sweep:{MODEL}": Part(partial(_sweep, MODEL, 32_768)),
        f"warm:decoding:{SHAPE}": Part(partial(_warm_decoding, [MODEL, SHAPE], ROWS)),
        f"peers:{SHAPE}": Part(partial(_peers, shapes[SHAPE])),
        f"decoding:{MODEL}": Part(partial(_decodings, MODEL, ROWS)),
        f"decoding:{SHAPE}": Part(partial(_decodings, SHAPE, ROWS[:1])),
        f"decoding:{SHAPE}:wide": Part(partial(_decodings, SHAPE, ROWS[1:]), needs=WIDE),
        "activations": Part(partial(_activations, SHAPE, 32_768)),
        "tests:operators": Part(partial(_tests, "test_operators.py")),
        f"eager:{SHAPE}": Part(partial(_eager, shapes[SHAPE])),
        f"operators:{SMALLEST}": Part(partial(_operators, shapes[SMALLEST])),
        f"training:{SMALLEST}": Part(partial(_trainings, SMALLEST, list(LENGTHS))),
        f"positions:{SMALLEST}": Part(partial(_positions, SMALLEST, FAR)),
        f"positions:{MODEL}": Part(partial(_positions, MODEL, FAR)),
        f"peers:{MODEL}": Part(partial(_peers, shapes[MODEL])),
        f"peers:{SMALLEST}": Part(partial(_peers, shapes[SMALLEST])),
        f"compiled:{SMALLEST}": Part(partial(_compiled, shapes[SMALLEST])),
        f"compiled:{MODEL}": Part(partial(_compiled, shapes[MODEL]), asked=True),
        f"compiled:{SHAPE}": Part(partial(_compiled, shapes[SHAPE]), asked=True),
    }


def small() -> dict[str, Part]:
    """Return the same parts with shapes that are small enough for a CPU."""
    shape = Shape("tiny", GeckoConfig.preset("tiny"), 512)
    return {
        RATES: Part(partial(_rates, 2**22, 512)),
        "operators:tiny": Part(partial(_operators, shape)),
        "eager:tiny": Part(partial(_eager, shape)),
        "warm:decoding:tiny": Part(partial(_warm_decoding, ["tiny"], (1,))),
        "tests:sizes": Part(partial(_tests, "test_sizes.py")),
        "kernels:tiny": Part(partial(_kernels, "tiny", 512)),
        "sweep:tiny": Part(partial(_sweep, "tiny", 512)),
        "training:tiny": Part(partial(_trainings, "tiny", [256, 512])),
        "activations": Part(partial(_activations, "tiny", 512)),
        "peers:tiny": Part(partial(_peers, shape)),
        "decoding:tiny": Part(partial(_decodings, "tiny", (1, 3))),
        "positions:tiny": Part(partial(_positions, "tiny", [256, 1_024])),
    }


def measure(name: str, part: Part, bench: Bench, record: Record) -> None:
    """Measure the tasks of a part that have not started yet, and save each result at once.

    Raises:
        RuntimeError: CUDA no longer works in this process; the remaining tasks need another process.
    """
    for task in part.tasks(bench):
        if task.name not in record.tasks(name):
            record.begin_task(name, task.name)
            record.end_task(name, task.name, _measure_task(name, task, record))
            bench.check()


def _measure_task(part: str, task: Task, record: Record) -> str:
    """Measure a task; return why it failed, or ""."""
    try:
        for result in task.results:
            record.add(part, task.name, result)
            print(result, flush=True)
    except Exception as error:
        return why(error)
    return ""


def _rates(numbers: int, size: int, bench: Bench) -> Iterator[Task]:
    yield Task("copy and product", _later(Rates.measure, bench, numbers, size))


def _operators(shape: Shape, bench: Bench) -> Iterator[Task]:
    for operator in operators(shape, bench):
        yield Task(operator.name, measure_kernels(operator, shape.name, bench))


def _eager(shape: Shape, bench: Bench) -> Iterator[Task]:
    for operator in operators(shape, bench):
        yield Task(operator.name, _later(measure_eager, operator, shape.name, bench))


def _compiled(shape: Shape, bench: Bench) -> Iterator[Task]:
    """Yield tasks that compile eager forms, which unroll hundreds of pieces; this may exceed the time limit."""
    for operator in operators(shape, bench):
        yield Task(operator.name, _later(measure_compiled, operator, shape.name, bench))


def _trainings(name: str, lengths: list[int], bench: Bench) -> Iterator[Task]:
    config = GeckoConfig.preset(name)
    for length in lengths:
        for model, of in ((name, config), (f"{LLAMA}, equal to {name}", equal_llama(config))):
            yield Task(f"{model} at {length:,}", _later(train, model, of, length, bench))


def _kernels(preset: str, length: int, bench: Bench) -> Iterator[Task]:
    yield Task("a training step", kernel_times.measure(Step(preset, length), bench))


def _sweep(preset: str, length: int, bench: Bench) -> Iterator[Task]:
    """Yield a task per kernel; each makes the step anew, and tries the variants at its place."""
    step = Step(preset, length)
    call = step.prepare(bench.device)
    for place in places(step):
        yield Task(place.kernel, sweep(step, call, place, bench))


def _tests(file: str, bench: Bench) -> Iterator[Task]:
    yield Task(file, run_tests(file, bench))


def _warm(groups: dict[str, warm_cache.Group], bench: Bench) -> Iterator[Task]:
    for name, group in groups.items():
        yield Task(name, warm_cache.warm(name, group, bench))


def _warm_tests(bench: Bench) -> Iterator[Task]:
    from support.cases import VARIANTS

    sizes = {f"test_sizes, {name}": partial(warm_cache.sizes_of, name) for name in PRESETS}
    yield from _warm(sizes | {"test_models": partial(warm_cache.small_models_of, list(VARIANTS))}, bench)


def _warm_operators(presets: list[str], length: int, bench: Bench) -> Iterator[Task]:
    yield from _warm({f"operators, {x}": partial(warm_cache.operators_of, x, length) for x in presets}, bench)


def _warm_training(preset: str, lengths: list[int], bench: Bench) -> Iterator[Task]:
    yield from _warm({f"training, {preset}": partial(warm_cache.steps_of, preset, lengths)}, bench)


def _warm_sweep(preset: str, length: int, bench: Bench) -> Iterator[Task]:
    yield from _warm({f"sweep, {preset}": partial(warm_cache.variants_of, preset, length)}, bench)


def _warm_decoding(presets: list[str], counts: tuple[int, ...], bench: Bench) -> Iterator[Task]:
    yield from _warm({f"decoding, {x}": partial(warm_cache.decoding_of, x, counts) for x in presets}, bench)


def _activations(name: str, length: int, bench: Bench) -> Iterator[Task]:
    yield Task(f"a block of {name}", _later(activations.measure, name, length, bench))


def _peers(shape: Shape, bench: Bench) -> Iterator[Task]:
    for form, timings in peers(shape, bench):
        yield Task(form, timings)


def _positions(name: str, wanted: list[int], bench: Bench) -> Iterator[Task]:
    yield Task(name, positions(name, GeckoConfig.preset(name), wanted, bench))


def _decodings(name: str, counts: tuple[int, ...], bench: Bench) -> Iterator[Task]:
    config = GeckoConfig.preset(name)
    forms = decoding.FORMS if bench.device.type == "cuda" else (decoding.PYTORCH,)
    for rows in counts:
        for form in forms:
            yield Task(f"{form}, {rows} rows", _later(decoding.measure, name, config, form, rows, bench))


def _later(function: Callable[..., Result], *arguments: object) -> Iterator[Result]:
    yield function(*arguments)
