"""Operators of other projects for the same place in a model, at the same length and width, if they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu.operators import AVERAGE, Operator, Timing, measure
from gpu.shapes import Floor, Shape
from gpu.timing import Bench
from torch import Tensor

HEAD = 128
"""Head dimension of peers whose head dimension can be chosen."""
SCAN, WINDOW, WHOLE = "associative scan in Triton", "SDPA with a mask, chunk by chunk", "SDPA flash over the whole row"
GATED_DELTA, KIMI_DELTA = "gated delta rule (flash-linear-attention)", "KDA (flash-linear-attention)"

Reason = str
Maker = Callable[[Shape, Bench], Operator | Reason]


def peers(shape: Shape, bench: Bench) -> Iterator[tuple[str, Iterator[Timing]]]:
    """Yield the timings of each peer by its form; a peer that cannot run here gives the reason."""
    makers: list[tuple[str, str, Maker, Floor]] = [
        (AVERAGE, SCAN, associative_scan, shape.moving_average()),
        ("chunk attention", WINDOW, window_attention, shape.attention()),
        ("attention", WHOLE, whole_attention, shape.whole_attention()),
        ("token mixer", GATED_DELTA, gated_delta_rule, shape.norm()),
        ("token mixer", KIMI_DELTA, kimi_delta_attention, shape.norm()),
    ]
    for name, form, make, floor in makers:
        yield form, _peer(name, form, make, floor, shape, bench)


def _peer(name: str, form: str, make: Maker, floor: Floor, shape: Shape, bench: Bench) -> Iterator[Timing]:
    made = make(shape, bench)
    if isinstance(made, str):
        yield Timing(name, form, shape.name, floor, reason=made)
    else:
        yield measure(made, form, shape.name, bench)


def associative_scan(shape: Shape, bench: Bench) -> Operator | Reason:
    """Return CEMA written in the usual way: ``tl.associative_scan`` over time. Coefficients get no gradients."""
    if bench.device.type != "cuda":
        return "its kernel needs a GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from gpu.scan_kernel import scanned_average

    config = shape.config
    draw = [bench.random(config.model_dim, config.cema_modes, dtype=torch.float32) for _ in range(4)]
    damping, angle, real, imaginary = draw[0].sigmoid(), draw[1], draw[2], draw[3]
    q = torch.polar(damping, angle)
    gain = torch.complex(real, imaginary)

    def average(x: Tensor) -> Tensor:
        return scanned_average(x, q, gain)

    x = bench.random(1, shape.length, config.model_dim)
    return Operator(AVERAGE, average, [x], shape.moving_average())


def window_attention(shape: Shape, bench: Bench) -> Operator | Reason:
    """Return attention of each chunk's queries to the keys of its own and the previous chunk, with a boolean mask."""
    config = shape.config
    chunk, chunks = config.chunk_size, shape.length // config.chunk_size
    if chunks < 2:
        return "needs rows of several chunks"
    mask = torch.ones(chunk, 2 * chunk, dtype=torch.bool, device=bench.device).tril(chunk)

    def windows(x: Tensor) -> Tensor:
        own = x.unflatten(2, (chunks, chunk))
        before = torch.cat([torch.zeros_like(own[:, :, :1]), own[:, :, :-1]], dim=2)
        return torch.cat([before, own], dim=3).transpose(1, 2).flatten(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.unflatten(2, (chunks, chunk)).transpose(1, 2).flatten(0, 1)
        return F.scaled_dot_product_attention(queries, windows(k), windows(v), attn_mask=mask)

    sizes = [(1, config.num_heads, shape.length, width) for width in (config.key_head_dim, config.value_head_dim)]
    inputs = [bench.random(*sizes[0]), bench.random(*sizes[0]), bench.random(*sizes[1])]
    return Operator("chunk attention", attend, inputs, shape.attention())


def whole_attention(shape: Shape, bench: Bench) -> Operator | Reason:
    if shape.config.model_dim % HEAD:
        return f"needs a width that is a multiple of {HEAD}"
    heads = shape.config.model_dim // HEAD
    inputs = [bench.random(1, heads, shape.length, HEAD) for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Operator("attention", attend, inputs, shape.whole_attention())


def gated_delta_rule(shape: Shape, bench: Bench) -> Operator | Reason:
    return _of_flash_linear_attention(shape, bench, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", 1)


def kimi_delta_attention(shape: Shape, bench: Bench) -> Operator | Reason:
    return _of_flash_linear_attention(shape, bench, "fla.ops.kda", "chunk_kda", HEAD)


def _of_flash_linear_attention(shape: Shape, bench: Bench, module: str, name: str, decays: int) -> Operator | Reason:
    """Return a delta rule with ``decays`` log decays per head and token, and heads as wide as the model together."""
    if bench.device.type != "cuda":
        return "its kernels need a GPU"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    function = getattr(importlib.import_module(module), name)
    heads = shape.config.model_dim // HEAD
    sizes = [(1, shape.length, heads, HEAD)] * 3
    q, k, v = (bench.random(*size) for size in sizes)
    decay = F.logsigmoid(bench.random(1, shape.length, heads, decays, dtype=torch.float32))
    decay = decay.squeeze(-1) if decays == 1 else decay
    beta = bench.random(1, shape.length, heads).sigmoid()

    def mix(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    size = shape.length * shape.config.model_dim
    # The state is read, corrected and written once per token, as for Gecko's memory.
    floor = Floor(4 * size, 11 * size, 2 * 3 * size * HEAD)
    return Operator("token mixer", mix, [q, k, v, decay, beta], floor)
