"""Time of a training step on the CPU, by part of the model and by kind of operation.

    python benchmarks/cpu_breakdown.py --write            # writes benchmarks/results/cpu_PROCESSOR.md

Runs ``tiny`` (1 M parameters) or another preset, in float32, and in bfloat16 if the processor has bfloat16 products.
Times per token are those of plain steps; shares are from the profiler, over other steps of the same run, because it
slows steps down. Model FLOPs are those of ``gecko.train.throughput``, divided by the rate of large matrix products of
the same dtype, measured between the steps. This is the faster of PyTorch's two libraries: MKL reaches only half of an
AMD processor's float32 rate. With one thread, times are processor times, which other load disturbs less.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from measuring import command, load, machine, of_processor, parser_of, publish
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from training import step_of

import gecko
from gecko.layers import CEMA, FeedForward, LayerNorm, RMSNorm, TimestepNorm
from gecko.runtime.process import keep_freed_memory
from gecko.train.throughput import flops_per_token, multiplies_bfloat16

MODULES: dict[type[nn.Module], str] = {
    TimestepNorm: "timestep norm", CEMA: "moving average", RMSNorm: "RMS norm", LayerNorm: "layer norm",
    FeedForward: "feed-forward", nn.Embedding: "embedding",
}  # fmt: skip
FUNCTIONS = {
    "gecko.layers.gated_attention.project": "linear layers",
    "gecko.layers.gated_attention.chunk_attention": "chunk attention",
    "gecko.layers.gated_attention.working_memory": "working memory",
    "gecko.models.gecko.linear_cross_entropy": "head and loss",
}
REST = "gates, queries and keys, sums"
KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "mkldnn::_linear_pointwise"),
    "copies and fills": ("copy_", "fill_", "zero_", "cat", "index_select", "index_fill_", "constant_pad_nd"),
    "sums, norms, softmax": ("sum", "mean", "_softmax", "_softmax_backward_data", "_log_softmax", "logsumexp",
                             "linalg_vector_norm", "native_layer_norm", "native_layer_norm_backward", "var_mean"),
}  # fmt: skip
ELEMENTWISE = "element by element, and the rest"
KERNELS = "kernels in C"
"""Kind of the autograd functions of the operators' ``cpu.py``, recognised by a common prefix of their names."""
_PREFIX = "part: "
MATRIX = 2048
"""Size of the square matrices with which the rate of products is measured."""


@dataclass(frozen=True)
class Breakdown:
    """Results of one dtype and row length: seconds per step, shares of profiled time by (part, pass) and by kind."""

    config: gecko.GeckoConfig
    precision: torch.dtype
    length: int
    tokens: int
    seconds: float
    eager: float
    """Seconds per step without the C kernels."""
    rate: float
    """FLOP/s of large matrix products, measured between the steps."""
    parts: Counter[tuple[str, str]]
    kinds: Counter[str]

    @property
    def share(self) -> float:
        """Model FLOP/s divided by the rate of matrix products."""
        return flops_per_token(self.config, self.length) * self.tokens / self.seconds / self.rate


@contextmanager
def named_parts(model: nn.Module) -> Iterator[None]:
    """Within the context, the profiler sees to which part of the model each operation of forward belongs."""
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) in MODULES:
                stack.enter_context(_named_module(module, MODULES[type(module)]))
        for target, part in FUNCTIONS.items():
            stack.enter_context(_named_function(target, part))
        yield


@contextmanager
def _named_module(module: nn.Module, part: str) -> Iterator[None]:
    open_ranges: list[record_function] = []

    def begin(*_: Any) -> None:
        open_ranges.append(record_function(_PREFIX + part))
        open_ranges[-1].__enter__()

    def end(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    yield
    for handle in handles:
        handle.remove()


def _named_function(target: str, part: str) -> Any:
    package, _, name = target.rpartition(".")
    function = getattr(__import__(package, fromlist=[name]), name)

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(_PREFIX + part):
            return function(*args, **kwargs)

    return patch(target, named)


def shares(events: list[Any]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Return the self time of all operations by (part, "forward", "backward" or "other"), and by kind; both sum to 1.

    The profiler gives an operation of forward and its node of backward the same number.
    """
    part_of_node: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and _backward_node(event) is None:
            part = _part_of(event)
            if part is not None or event.sequence_nr not in part_of_node:
                part_of_node[event.sequence_nr] = part or REST
    parts: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    for event in events:
        parts[_place(event, part_of_node)] += event.self_cpu_time_total
        kinds[_kind(event.name)] += event.self_cpu_time_total
    return _normalised(parts), _normalised(kinds)


def _place(event: Any, part_of_node: dict[int, str]) -> tuple[str, str]:
    node = _backward_node(event)
    if node is not None:
        return part_of_node.get(node.sequence_nr, REST), "backward"
    if _within(event, "forward and backward") is None:
        return "clipping and AdamW", "forward"
    return _part_of(event) or REST, "forward"


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _within(event: Any, name: str) -> Any:
    return next((outer for outer in _ancestors(event) if outer.name == name), None)


def _part_of(event: Any) -> str | None:
    """Return the part of the innermost named range."""
    names = [outer.name.removeprefix(_PREFIX) for outer in _ancestors(event) if outer.name.startswith(_PREFIX)]
    return names[-1] if names else None


def _backward_node(event: Any) -> Any:
    nodes = (outer for outer in _ancestors(event) if outer.name.startswith("autograd::engine::evaluate_function"))
    return next(nodes, None)


def _kind(name: str) -> str:
    if name.removesuffix("Backward").endswith("CPU"):  # the autograd functions of C kernels
        return KERNELS
    return next((kind for kind, names in KINDS.items() if name.removeprefix("aten::") in names), ELEMENTWISE)


def _normalised(counts: Counter[Any]) -> Counter[Any]:
    total = sum(counts.values())
    return Counter({key: value / total for key, value in counts.items()})


def measure(
    config: gecko.GeckoConfig, precision: torch.dtype, length: int, tokens: int, rounds: int, profiled: int
) -> Breakdown:
    """Measure plain steps and matrix products alternately, then profiled steps."""
    torch.manual_seed(0)
    model = gecko.Gecko(config)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        rounded = precision == torch.bfloat16
        with record_function("forward and backward"), torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            return model.loss(inputs, targets)

    step = step_of(model, loss)
    batch = torch.randint(0, 256, (tokens // length, length + 1))
    for _ in range(3):
        step(batch)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = (partial(step, batch), _without_kernels(partial(step, batch)), *_products(precision))
    times = [[_seconds(clock, call) for call in calls] for _ in range(rounds)]
    with named_parts(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(profiled):
            step(batch)
    parts, kinds = shares(list(profiler.events()))
    seconds, eager, *products = (statistics.median(several) for several in zip(*times, strict=True))
    return Breakdown(config, precision, length, tokens, seconds, eager, 2 * MATRIX**3 / min(products), parts, kinds)


def _products(dtype: torch.dtype) -> Iterator[Callable[[], Tensor]]:
    """Yield a large product by each library that supports the dtype: MKL for float32 only, oneDNN for all."""
    a, b = torch.randn(2, MATRIX, MATRIX).to(dtype)
    yield partial(torch.mm, a, b)
    if dtype == torch.float32:
        yield partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")


def _without_kernels(function: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        with patch("gecko.ops.backends.dispatch._cpu_kernels_installed", lambda: False):
            return function()

    return call


def _seconds(clock: Callable[[], float], function: Callable[[], Any]) -> float:
    begin = clock()
    function()
    return clock() - begin


def page(results: list[Breakdown], model: str, rounds: int, command: str) -> list[str]:
    """Return the results in Markdown."""
    lines = [
        "# A training step on the CPU", "", f"{machine()}. {load()}", "",
        f"Gecko `{model}`, {results[0].tokens:,} tokens a step: loss, backward, clip, AdamW. "
        "Steps, with the kernels in C and without, and large matrix products take turns; figures are medians of "
        f"{rounds}, in {_clock()}. In bfloat16 are the operands of products, as with `precision=bfloat16`.", "",
        "| dtype | tokens a row | tokens/s | µs a token | without kernels in C | matrix products, GFLOP/s "
        "| model FLOPs a second over that |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for result in results:
        lines.append(
            f"| {_name(result.precision)} | {result.length:,} | {result.tokens / result.seconds:,.0f} "
            f"| {1e6 * result.seconds / result.tokens:.1f} | {1e6 * result.eager / result.tokens:.1f} "
            f"| {result.rate / 1e9:.0f} | {result.share:.1%} |"
        )
    for result in results:
        lines += [
            "",
            f"## Rows of {result.length:,} tokens, {_name(result.precision)}: µs a token",
            "",
            *_part_table(result),
        ]
        lines += ["", *_kind_table(result)]
    return [*lines, "", f"Written by `{command}`."]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _clock() -> str:
    return "processor time" if torch.get_num_threads() == 1 else "wall time"


def _part_table(result: Breakdown) -> list[str]:
    micro = 1e6 * result.seconds / result.tokens
    names = sorted({part for part, _ in result.parts}, key=lambda part: -_both(result, part))
    return [
        "| part | forward | backward | together | share |", "|---|---:|---:|---:|---:|",
        *(f"| {part} | {micro * result.parts[part, 'forward']:.1f} | {micro * result.parts[part, 'backward']:.1f} "
          f"| {micro * _both(result, part):.1f} | {_both(result, part):.0%} |" for part in names),
    ]  # fmt: skip


def _both(result: Breakdown, part: str) -> float:
    return result.parts[part, "forward"] + result.parts[part, "backward"]


def _kind_table(result: Breakdown) -> list[str]:
    micro = 1e6 * result.seconds / result.tokens
    return [
        "| kind | µs a token | share |", "|---|---:|---:|",
        *(f"| {kind} | {micro * share:.1f} | {share:.0%} |" for kind, share in result.kinds.most_common()),
    ]  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny", help="a preset")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_048, 8_192], help="tokens a row")
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profiled", type=int, default=3, help="steps under the profiler")
    args = parser.parse_args()
    sizes = args.tokens, args.rounds, args.profiled
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    cpu = torch.device("cpu")
    dtypes = [torch.float32, torch.bfloat16] if multiplies_bfloat16(cpu) else [torch.float32]
    config = gecko.GeckoConfig.preset(args.model)
    results = [measure(config, dtype, length, *sizes) for dtype in dtypes for length in args.lengths]
    name = "cpu" if args.model == "tiny" else f"cpu_{args.model.replace('-', '_')}"
    publish(of_processor(name), page(results, args.model, args.rounds, command(args)), args.write)


if __name__ == "__main__":
    main()
