"""One token of several sequences through a whole network, as one call into C.

The structures mirror ``cpu_network.h`` and ``cpu_products.h``: every field is 8 bytes wide. A structure holds addresses
only; ``Network`` keeps the tensors that they belong to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import library
from gecko.ops.decoding.weights import REGISTER, Record, Weights

WEIGHTS_PER_THREAD = 2**21
"""Products of weights and activations for which another thread pays. Threads meet six times a layer: on a busy machine,
two of them take many times as long as one for a network of a million weights."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}


class _Matrix(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("kind", "outputs", "inputs", "row_bytes")] + [
        (name, c_void_p) for name in ("weight", "scale", "bias")
    ]


class _RunningNorm(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("scale", "shift", "count", "mean", "variance")]


class _ChunkSummary(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("weight", "key_sum", "value_sum")]


_MIXER_MATRICES = ("to_shared", "to_value", "to_gate", "to_hidden", "to_output")
_FEED_FORWARD_MATRICES = ("fc1", "fc3", "fc2")


class _Layer(ctypes.Structure):
    _fields_ = [
        ("norm", _RunningNorm),
        *((name, c_void_p) for name in ("cema_tables", "cema_skip", "cema", "cema_norm")),
        *((name, _Matrix) for name in _MIXER_MATRICES),
        *((name, c_void_p) for name in ("qk_scale", "qk_shift", "keys", "values", "memory", "normaliser")),
        ("previous", _ChunkSummary),
        ("current", _ChunkSummary),
        *((name, c_void_p) for name in ("previous_resets", "ffn_norm_scale", "ffn_norm_shift", "ffn_scale")),
        *((name, _Matrix) for name in _FEED_FORWARD_MATRICES),
    ]


class _Network(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in (
            "rows", "layers", "features", "heads", "key", "value", "hidden", "modes", "chunk", "groups", "norm_groups",
            "vocabulary", "attention", "memory", "rope_heads", "swiglu", "two_hop", "cumulative",
            "keys_are_bfloat16", "values_are_bfloat16", "page_bytes",
        )),
        *((name, c_double) for name in ("beta_mean", "beta_variance", "eps", "embedding_scale")),
        ("phases", c_void_p),
        *((name, _Matrix) for name in ("embedding", "head")),
        ("final_norm", _RunningNorm),
        ("layer", POINTER(_Layer)),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        *((name, c_void_p) for name in ("token", "slot", "position", "document_start", "logits", "hidden")),
    ]


class Network:
    """A network with the states of its sequences, ready to be called.

    Args:
        record: the fields of the network; "layer" is a list of those of the layers, and "rows" the most sequences that
            a call may have.
        clock: (rows,) int64, tokens that each sequence has read, and the position at which its document started.
    """

    def __init__(self, record: Record, clock: tuple[Tensor, Tensor]) -> None:
        self._kept: list[Tensor] = []
        self._page_bytes = record["page_bytes"]
        layers = [self._filled(_Layer, layer) for layer in record.pop("layer")]
        self._layers = (_Layer * len(layers))(*layers)
        self._network = self._filled(_Network, record)
        self._network.layer = self._layers
        self._room: dict[int, Tensor] = {}
        self._vocabulary = record["vocabulary"]
        self._products = sum(_products(one) for one in self._layers) + _size(self._network.head)
        self._features, self._rows = record["features"], record["rows"]
        self._logits = torch.empty(self._rows, self._vocabulary)
        self._tokens = (c_int64 * self._rows)()
        slots, position, start = (self._value(None, x) for x in (torch.arange(self._rows), *clock))
        logits = self._value(None, self._logits)
        self._batch = _Batch(0, ctypes.addressof(self._tokens), slots, position, start, logits, None)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of each of the first sequences and return the logits of the next ones, (rows, vocabulary).

        The states in the slots are changed in place, except for the clock. The next call overwrites the logits.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        self._check(tokens)
        rows = self._batch.rows = len(tokens)
        self._tokens[:rows] = tokens
        self._run(self._batch)
        return self._logits[:rows]

    def hidden_step(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens as ``step`` does, and return the input of the head, (rows, D) float32."""
        self._check(tokens)
        rows = len(tokens)
        hidden = torch.empty(rows, self._features)
        batch = _Batch.from_buffer_copy(self._batch)
        batch.rows, batch.logits, batch.hidden = rows, None, hidden.data_ptr()
        self._tokens[:rows] = tokens
        self._run(batch)
        return hidden

    def hidden(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Read one token of each of some sequences and return the input of the head, (rows, D) float32.

        The states in ``slots``, all different, are changed in place.

        Args:
            positions: tokens that each sequence has read, in one document. The clock of the network is not used.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        self._check(tokens)
        rows = len(tokens)
        hidden = torch.empty(rows, self._features)
        lists = [(c_int64 * rows)(*numbers) for numbers in (tokens, slots, positions, [0] * rows)]
        self._run(_Batch(rows, *(ctypes.addressof(one) for one in lists), None, hidden.data_ptr()))
        return hidden

    def _check(self, tokens: Sequence[int]) -> None:
        assert len(tokens) <= self._rows, "a call has at most as many sequences as the network was made for"
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ValueError(f"tokens must be ids in 0..{self._vocabulary - 1}; got {list(tokens)}.")

    def _run(self, batch: _Batch) -> None:
        threads = max(1, min(torch.get_num_threads(), batch.rows * self._products // WEIGHTS_PER_THREAD))
        _step(ctypes.byref(self._network), ctypes.byref(batch), self._room_of(threads), threads)

    def _room_of(self, threads: int) -> int:
        """Return the address of the work memory, which is zero before the first call."""
        if threads not in self._room:
            numbers = _room_for(ctypes.byref(self._network), threads)
            try:
                self._room[threads] = torch.zeros(numbers)
            except RuntimeError as error:
                raise MemoryError(
                    f"decoding needs {4 * numbers:,} bytes to work in; the system refused them."
                ) from error
        return self._room[threads].data_ptr()

    def _filled(self, kind: Any, record: Record) -> Any:
        names = dict(kind._fields_)
        return kind(**{name: self._value(names[name], value) for name, value in record.items()})

    def _value(self, kind: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return self._filled(kind, value)
        if isinstance(value, Weights):
            return self._matrix(value)
        if isinstance(value, Tensor):
            paged = bool(self._page_bytes) and value.stride(0) * value.itemsize == self._page_bytes
            assert value.device.type == "cpu", "kernels take tensors of the CPU"
            assert (value[0] if paged else value).is_contiguous(), "kernels take contiguous tensors, or views of pages"
            self._kept.append(value)
            return value.data_ptr()
        return value

    def _matrix(self, weights: Weights) -> _Matrix:
        weight, (scale, bias) = weights.weight, (self._value(None, x) for x in (weights.scale, weights.bias))
        assert weights.inputs % REGISTER == 0, "rows of weights are whole registers"
        return _Matrix(
            _KINDS[weight.dtype], len(weight), weights.inputs, weight.shape[1] * weight.itemsize,
            self._value(None, weight), scale, bias,
        )  # fmt: skip


def _size(matrix: _Matrix) -> int:
    return int(matrix.outputs * matrix.inputs)


def _products(layer: _Layer) -> int:
    """Return the number of weights in the matrices of a layer."""
    return sum(_size(getattr(layer, name)) for name in (*_MIXER_MATRICES, *_FEED_FORWARD_MATRICES))


def _room_for(network: Any, threads: int) -> int:
    return int(_function("decoding_room", c_int64, (c_void_p, c_int64))(network, threads))


def _step(network: Any, batch: Any, room: int, threads: int) -> None:
    _function("decoding_step", c_int64, (c_void_p, c_void_p, c_void_p, c_int64))(network, batch, room, threads)


def samples_in_c(logits: Tensor) -> bool:
    """Return whether ``first_broken`` and ``sample`` support these logits."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library("decoding") is not None


def first_broken(logits: Tensor) -> int | None:
    """Return the first row of logits (B, V) with a number that is not finite; None if there is none."""
    found = _function("decoding_first_broken", c_int64, (c_void_p, c_int64, c_int64))(
        logits.contiguous().data_ptr(), *logits.shape
    )
    return None if found < 0 else int(found)


def sample(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """Return one token per row of finite logits (B, V).

    Args:
        temperatures: 0 takes the first of the most likely tokens.
        uniforms: in [0, 1), the random number of each row; not used at temperature 0.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens, weights = (c_int64 * rows)(), (c_double * vocabulary)()
    numbers = (c_double * rows)(*temperatures), (c_double * rows)(*uniforms)
    arguments = (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)
    _function("decoding_sample", c_int64, arguments)(logits.data_ptr(), rows, vocabulary, *numbers, weights, tokens)
    return list(tokens)


@cache
def _function(name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    loaded = library("decoding")
    assert loaded is not None, "the decoder asks for the library first"
    function = getattr(loaded, name)
    function.restype, function.argtypes = result, arguments
    return function
