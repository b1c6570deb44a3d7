"""Checks, dtype rules and batching shared by all operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gecko.ops.backends.dispatch import is_package, on_gpu, products_are_rounded
from gecko.runtime.tensors import TensorRecord, map_tensors, tensors_of, to_device
from gecko.segments import Segments


def identity(tensors: Iterable[Tensor]) -> Hashable:
    """Return a key that changes when a tensor is replaced, converted or written to.

    Writes through ``.data`` do not change it. Tensors made in inference mode have no version counter, so for them only
    a replacement changes the key.
    """
    return tuple((x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for x in tensors)


def content(tensors: list[Tensor]) -> Hashable | None:
    """Return a key that changes with any number in the tensors, whoever wrote it; None if no C kernel can read them.

    It takes as long as to read the tensors from memory: about as long as to decode a token.
    """
    if not is_package():
        return None
    from gecko.ops.decoding import cpu

    return cpu.content(tensors)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics and states for the input x: float32, or float64 if x is float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def linear_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that linear layers read for x: autocast's if it is enabled, else that of x.

    Autocast leaves float64 as it is. C kernels that round their operands to bfloat16 read x as it is, even under it.
    """
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast and not (device == "cpu" and products_are_rounded()) else x.dtype


def empty_contiguous(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor like x, for its gradient."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def contiguous(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    """Return contiguous tensors by name, as arguments of a kernel."""
    return {name: None if x is None else x.contiguous() for name, x in tensors.items()}


def float32_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a b in float32 for two matrices, or batches of them, of one dtype. Sums over 16-bit factors are not
    rounded."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if on_gpu(a) and a.itemsize == 2:
        return multiply(a, b, out_dtype=torch.float32, out=out)
    return multiply(a.float(), b.float(), out=out)


def from_linear(y: Tensor, x: Tensor) -> Tensor:
    """Return y, the output of PyTorch's linear layer for x, in the dtype of x if C kernels round their operands."""
    return y.to(x.dtype) if products_are_rounded() else y


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """Return a context that disables autocast: each operator chooses the dtypes of its products itself."""
    if not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_affine(weight: Tensor | None, bias: Tensor | None, features: int) -> None:
    """Raise ValueError unless weight and bias are both None or both of shape (features,)."""
    if (weight is None) != (bias is None):
        given = "bias" if weight is None else "weight"
        raise ValueError(f"weight and bias must both be given, or neither; got a {given} only.")
    check_shape("weight", weight, (features,))
    check_shape("bias", bias, (features,))


def check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has the expected shape or is None."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}; got {tuple(tensor.shape)}.")


def layout_of_call(segments: Segments | None, batch: int, length: int, device: torch.device) -> Segments:
    """Return ``segments``, or the layout of a call whose rows continue their documents.

    Raises:
        ValueError: they do not describe a call of this batch and length.
    """
    segments = segments or Segments.build(batch, length, device=device)
    if (segments.batch, segments.length) != (batch, length):
        raise ValueError(
            f"segments must be those of the call, {batch} rows of {length} tokens; "
            f"got {segments.batch} of {segments.length}."
        )
    return segments


_NUMBERS = 2**17
"""Numbers per thread and tensor in a slice. In float32 they fill a quarter of a 2 MB cache."""


def slices(rows: int, length: int, features: int) -> Iterator[tuple[slice, slice]]:
    """Yield the (rows, steps) of slices of a batch that stay in a core's cache. A pass over activations in memory takes
    several times as long, so operators with hand-written gradients on a CPU make their passes slice by slice."""
    tokens = max(1, _NUMBERS * torch.get_num_threads() // features)
    height, width = max(1, tokens // length), min(length, tokens)
    for row, step in product(range(0, rows, height), range(0, length, width)):
        yield slice(row, row + height), slice(step, step + width)


State = TypeVar("State", bound=TensorRecord | Tensor)
Form = Callable[[tuple[Tensor, ...], State, Segments], tuple[Tensor, State]]
"""An operator as a function of its inputs, its state and the layout of the call."""


def common_chunk_offset(segments: Segments, period: int) -> int | None:
    """Return the position modulo ``period`` if it is the same in all rows, else None."""
    if segments.at_start:
        return 0

    def find() -> int | None:
        offsets = set((segments.clock.position % period).tolist())
        return offsets.pop() if len(offsets) == 1 else None

    return segments.once(("chunk offset", period), find)


def padded(x: Tensor, before: int, after: int) -> Tensor:
    """Pad the second to last dimension with zeros. Return x itself, not a copy, if there is nothing to pad."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def run_by_chunk_offset(
    form: Form[State], inputs: tuple[Tensor, ...], state: State, segments: Segments, period: int
) -> tuple[Tensor, State]:
    """Run ``form`` once for each group of rows of the same position modulo ``period``. All tensors are batch first."""
    if common_chunk_offset(segments, period) is not None:
        return form(inputs, state, segments)
    return _run_by_group(form, inputs, state, segments, (segments.clock.position % period).tolist())


def run_by_length(
    operator: Callable[..., tuple[Tensor, State]], inputs: tuple[Tensor, ...], state: State, segments: Segments
) -> tuple[Tensor, State]:
    """Run ``operator(*inputs, state=…, segments=…)`` without padding, once for each group of rows of the same length.

    All tensors are batch first; steps are the second to last dimension of inputs and outputs. Outputs at padding are 0.
    """
    assert segments.ends is not None, "there must be padding"

    def without_padding(inputs: tuple[Tensor, ...], state: State, padded_rows: Segments) -> tuple[Tensor, State]:
        part = padded_rows.unpadded()
        output, state = operator(*(x.narrow(-2, 0, part.length) for x in inputs), state=state, segments=part)
        return padded(output, 0, segments.length - part.length), state

    return _run_by_group(without_padding, inputs, state, segments, segments.ends.tolist())


def _run_by_group(
    form: Form[State], inputs: tuple[Tensor, ...], state: State, segments: Segments, groups: list[int]
) -> tuple[Tensor, State]:
    device = inputs[0].device
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        rows_of[group].append(row)
    outputs, states = [], []
    for rows in rows_of.values():
        pick = partial(torch.index_select, dim=0, index=to_device(torch.tensor(rows, device="cpu"), device))
        output, part = form(tuple(map(pick, inputs)), map_tensors(state, pick), segments.select(rows))
        outputs.append(output)
        states.append(iter(tensors_of(part)))
    order = torch.tensor([row for rows in rows_of.values() for row in rows], device="cpu").argsort()
    put = partial(torch.index_select, dim=0, index=to_device(order, device))
    return put(torch.cat(outputs)), map_tensors(state, lambda _: put(torch.cat([next(part) for part in states])))
