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
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
from measuring import in_turns, of_processor, parsed, parser_of, publish, seconds_of, table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from training import MATRIX, step_of

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
    "gecko.layers.gated_attention.start_working_memory": "working memory",
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
"""Kind of the operators' autograd functions in C, recognised by the end of their names."""
_PREFIX = "part: "


@dataclass(frozen=True)
class Breakdown:
    """Results of one dtype and row length: microseconds per token, and shares of profiled time."""

    name: str
    """Name of the dtype."""
    length: int
    micro: float
    eager: float
    """Microseconds per token without the C kernels."""
    rate: float
    """FLOP/s of large matrix products, measured between the steps."""
    share: float
    """Model FLOP/s divided by the rate of matrix products."""
    parts: Counter[tuple[str, str]]
    """By part and pass."""
    kinds: Counter[str]

    def tables(self) -> Iterator[str]:
        """Yield the section of this result."""

        def row(name: str, *shares: float) -> tuple[object, ...]:
            return name, *(self.micro * share for share in shares), shares[-1]

        parts = {part: [self.parts[part, one] for one in ("forward", "backward")] for part, _ in self.parts}
        yield f"## Rows of {self.length:,} tokens, {self.name}: µs a token"
        yield table(
            ["part", "forward|.1f", "backward|.1f", "together|.1f", "share|.0%"],
            sorted((row(part, *both, sum(both)) for part, both in parts.items()), key=lambda one: -one[-1]),
        )
        kinds = (row(kind, share) for kind, share in self.kinds.most_common())
        yield table(["kind", "µs a token|.1f", "share|.0%"], kinds)


@contextmanager
def named_parts(model: nn.Module) -> Iterator[None]:
    """Within the context, the profiler sees to which part of the model each operation of forward belongs."""
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) in MODULES:
                named = record_function(_PREFIX + MODULES[type(module)])(module.forward)
                stack.enter_context(patch.object(module, "forward", named))
        for target, part in FUNCTIONS.items():
            stack.enter_context(patch(target, record_function(_PREFIX + part)(resolve_name(target))))
        yield


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
    total = sum(kinds.values())
    return tuple(Counter({key: value / total for key, value in counts.items()}) for counts in (parts, kinds))


def _place(event: Any, part_of_node: dict[int, str]) -> tuple[str, str]:
    node = _backward_node(event)
    if node is not None:
        return part_of_node.get(node.sequence_nr, REST), "backward"
    if all(outer.name != "forward and backward" for outer in _ancestors(event)):
        return "clipping and AdamW", "forward"
    return _part_of(event) or REST, "forward"


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


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

    batch = torch.randint(0, 256, (tokens // length, length + 1))
    step = partial(step_of(model, loss), batch)
    for _ in range(3):
        step()

    def eager() -> None:
        with patch("gecko.ops.backends.dispatch._cpu_kernels_installed", lambda: False):
            step()

    # A large product by each library that supports the dtype: MKL for float32 only, oneDNN for all.
    a, b = torch.randn(2, MATRIX, MATRIX).to(precision)
    calls: dict[str, Callable[[], object]] = {"step": step, "eager": eager, "product": partial(torch.mm, a, b)}
    if precision == torch.float32:
        calls["oneDNN"] = partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times = in_turns({name: partial(seconds_of, call, clock) for name, call in calls.items()}, rounds)
    with named_parts(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(profiled):
            step()
    seconds, eagerly, *products = (statistics.median(several) for several in times.values())
    rate = 2 * MATRIX**3 / min(products)
    share = flops_per_token(config, length) * tokens / seconds / rate
    name = str(precision).removeprefix("torch.")
    parts, kinds = shares(list(profiler.events()))
    return Breakdown(name, length, 1e6 * seconds / tokens, 1e6 * eagerly / tokens, rate, share, parts, kinds)


def main() -> None:
    given = parsed(parser_of(
        __doc__, threads=2, model=("tiny", "a preset"), lengths=([2_048, 8_192], "tokens a row"),
        tokens=(8_192, "tokens a step"), rounds=(9, "in turns"), profiled=(3, "steps under the profiler"),
    ))  # fmt: skip
    keep_freed_memory()
    dtypes = [torch.float32, torch.bfloat16] if multiplies_bfloat16(torch.device("cpu")) else [torch.float32]
    config = gecko.GeckoConfig.preset(given.model)
    sizes = given.tokens, given.rounds, given.profiled
    results = [measure(config, dtype, length, *sizes) for dtype in dtypes for length in given.lengths]
    clock = "processor time" if given.threads == 1 else "wall time"
    columns = ["dtype", "tokens a row|,", "tokens/s|,.0f", "µs a token|.1f", "without kernels in C|.1f",
               "matrix products, GFLOP/s|.0f", "model FLOPs a second over that|.1%"]  # fmt: skip
    rows = ((x.name, x.length, 1e6 / x.micro, x.micro, x.eager, x.rate / 1e9, x.share) for x in results)
    publish(
        of_processor("cpu" if given.model == "tiny" else f"cpu_{given.model.replace('-', '_')}"), given,
        "A training step on the CPU", "",
        f"Gecko `{given.model}`, {given.tokens:,} tokens a step: loss, backward, clip, AdamW. Steps, with the kernels "
        f"in C and without, and large matrix products take turns; figures are medians of {given.rounds}, in {clock}. "
        "In bfloat16 are the operands of products, as with `precision=bfloat16`.",
        table(columns, rows), *(part for result in results for part in result.tables()),
    )  # fmt: skip


if __name__ == "__main__":
    main()
