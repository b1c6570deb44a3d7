"""One token of several sequences through a whole network, as one call into C.

The structures mirror ``cpu_network.h`` and ``cpu_products.h``: every field is 8 bytes wide. A structure holds addresses
only; ``Network`` keeps the tensors that they belong to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gecko.ops.backends.cpu import address, library
from gecko.ops.backends.dispatch import PLAIN
from gecko.ops.decoding import GROUP, REGISTER, Record, Weights

WEIGHTS_PER_THREAD = 2**21
"""Products of weights and activations for which another thread pays. Threads meet six times a layer: on a busy machine,
two of them take many times as long as one for a network of a million weights."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}


def _each(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one kind."""
    return [(name, kind) for name in names.split()]


class _Matrix(ctypes.Structure):
    _fields_ = [*_each(c_int64, "kind outputs inputs row_bytes"), *_each(c_void_p, "weight scale bias")]


class _RunningNorm(ctypes.Structure):
    _fields_ = _each(c_void_p, "scale shift count mean variance")


class _ChunkSummaryStruct(ctypes.Structure):
    _fields_ = _each(c_void_p, "weight key_sum value_sum")


_MIXER_MATRICES = "to_shared to_query to_key to_value to_gate to_hidden to_output"
_FEED_FORWARD_MATRICES = "fc1 fc3 fc2"


class _Layer(ctypes.Structure):
    _fields_ = [
        ("norm", _RunningNorm),
        *_each(c_void_p, "cema_tables cema_skip cema cema_norm"),
        *_each(_Matrix, _MIXER_MATRICES),
        *_each(c_void_p, "qk_scale qk_shift query_scale key_scale keys values sink_keys sink_values memory normaliser"),
        *_each(_ChunkSummaryStruct, "previous current"),
        *_each(c_void_p, "previous_resets ffn_norm_scale ffn_norm_shift ffn_scale"),
        *_each(_Matrix, _FEED_FORWARD_MATRICES),
    ]


class _NetworkStruct(ctypes.Structure):
    _fields_ = [
        *_each(c_int64, "rows slots layers features heads key value hidden modes chunk groups norm_groups vocabulary"),
        *_each(c_int64, "attention memory rope_heads swiglu two_hop cumulative keys_are_bfloat16 values_are_bfloat16"),
        *_each(c_int64, "key_heads sinks separate unit_queries steps_only averages gate hidden_branch silu_values"),
        ("page_bytes", c_int64),
        *_each(c_double, "beta_mean beta_variance eps embedding_scale"),
        ("phases", c_void_p),
        *_each(_Matrix, "embedding head"),
        ("final_norm", _RunningNorm),
        ("layer", POINTER(_Layer)),
    ]


class _BatchStruct(ctypes.Structure):
    _fields_ = [("rows", c_int64), *_each(c_void_p, "token slot position document_start logits hidden")]


_VECTOR, _HEADS, _KEY_HEADS = "features", "slots heads", "slots key_heads"
_SHAPES = {
    "scale": _VECTOR, "shift": _VECTOR, "count": "slots", "mean": "slots groups", "variance": "slots groups",
    "cema_tables": "parts features table", "cema_skip": _VECTOR, "cema": "slots features modes pair",
    "cema_norm": _VECTOR, "to_shared": "keys_of_all features", "to_query": "keys_of_all features",
    "to_key": "own_keys features", "to_value": "own_values features", "to_gate": "values_of_all features",
    "to_hidden": "features features", "to_output": "features values_of_all", "qk_scale": "copies keys_of_all",
    "qk_shift": "copies keys_of_all", "query_scale": "keys_of_all", "key_scale": "own_keys",
    "keys": f"{_KEY_HEADS} window key", "values": f"{_KEY_HEADS} window value", "sink_keys": f"{_KEY_HEADS} sinks key",
    "sink_values": f"{_KEY_HEADS} sinks value", "memory": f"{_HEADS} key value", "normaliser": f"{_HEADS} key",
    "weight": f"{_HEADS} key", "key_sum": f"{_HEADS} key key", "value_sum": f"{_HEADS} key value",
    "previous_resets": "slots", "ffn_norm_scale": _VECTOR, "ffn_norm_shift": _VECTOR, "ffn_scale": _VECTOR,
    "fc1": "hidden features", "fc3": "hidden features", "fc2": "features hidden", "phases": "window turns pair",
    "embedding": "vocabulary features", "head": "vocabulary features",
}  # fmt: skip
"""Shapes of the tensors that C reads and writes, in sizes of the network, and of matrices without their padding."""


def _sizes(record: Record) -> dict[str, int]:
    keys, values = (record["heads"] * record[name] for name in ("key", "value"))
    own_keys, own_values = (record["key_heads"] * record[name] for name in ("key", "value"))
    return {
        **record, "slots": len(record["layer"][0]["keys"]), "window": 2 * record["chunk"], "pair": 2, "parts": 4,
        "table": -(-2 * record["modes"] // 16) * 16, "turns": -(-record["key"] // 2), "keys_of_all": keys,
        "values_of_all": values, "own_keys": own_keys, "own_values": own_values,
        "copies": 4 if record["memory"] else 2,
    }  # fmt: skip


def _absent(record: Record) -> set[str]:
    """Return the fields that a network of these numbers need not have."""
    without = {
        "ffn_scale": True, "layer": True, "fc3": not record["swiglu"],
        **dict.fromkeys(("memory", "normaliser", "previous", "current", "previous_resets"), not record["memory"]),
        **dict.fromkeys(("to_shared", "qk_scale", "qk_shift"), record["separate"]),
        **dict.fromkeys(("to_query", "to_key", "query_scale", "key_scale"), not record["separate"]),
        **dict.fromkeys(("shift", "count", "mean", "variance", "ffn_norm_shift"), record["steps_only"]),
        **dict.fromkeys(("cema_tables", "cema_skip", "cema", "cema_norm"), not record["averages"]),
        "to_gate": not record["gate"], "to_hidden": not record["hidden_branch"],
        **dict.fromkeys(("sink_keys", "sink_values"), not record["sinks"]),
    }  # fmt: skip
    return {name for name, missing in without.items() if missing}


class Network:
    """A network with the states of its sequences, ready to be called.

    Args:
        record: the fields of the network; "layer" is a list of those of the layers, and "rows" the most sequences that
            a call may have.
        clock: (rows,) int64, tokens that each sequence has read, and the position at which its document started.

    Raises:
        ValueError: a tensor is missing, or has another dtype, shape or order in memory than C reads.
    """

    def __init__(self, record: Record, clock: tuple[Tensor, Tensor]) -> None:
        self._kept: list[Tensor] = []
        self._page_bytes, self._sizes = record["page_bytes"], _sizes(record)
        bfloat16 = {name: torch.bfloat16 for name in ("keys", "values") if record[f"{name}_are_bfloat16"]}
        bfloat16 |= {f"sink_{name}": dtype for name, dtype in bfloat16.items()}
        self._dtypes = {"count": torch.int64, "previous_resets": torch.bool, **bfloat16}
        self._absent = _absent(record)
        layers = [self._filled(_Layer, layer) for layer in record.pop("layer")]
        self._layers = (_Layer * len(layers))(*layers)
        self._network = self._filled(_NetworkStruct, record | {"slots": self._sizes["slots"]})
        self._network.layer = self._layers
        self._room: dict[int, Tensor] = {}
        names = f"{_MIXER_MATRICES} {_FEED_FORWARD_MATRICES}".split()
        matrices = [self._network.head, *(getattr(layer, name) for layer in self._layers for name in names)]
        self._products = sum(int(matrix.outputs * matrix.inputs) for matrix in matrices)
        self._vocabulary, self._features, self._rows = (record[name] for name in ("vocabulary", "features", "rows"))
        self._logits = torch.empty(self._rows, self._vocabulary, dtype=torch.float32, device="cpu")
        self._tokens, self._slots = (c_int64 * self._rows)(), (c_int64 * self._rows)(*range(self._rows))
        self._clocked = min(self._rows, clock[0].numel())
        self._clock = [self._address("the clock", x, torch.int64, (clock[0].numel(),)) for x in clock]
        lists = ctypes.addressof(self._tokens), ctypes.addressof(self._slots), *self._clock
        self._batch = _BatchStruct(0, *lists, self._logits.data_ptr(), None)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of each of the first sequences and return the logits of the next ones, (rows, vocabulary).

        The states in the slots are changed in place, except for the clock. The next call overwrites the logits.

        Raises:
            ValueError: a token is not in the vocabulary, or a clock does not count up from the start of a document.
        """
        self._check(tokens, self._clocked)
        rows = self._batch.rows = len(tokens)
        self._tokens[:rows] = tokens
        self._run(self._batch)
        return self._logits[:rows]

    def hidden_step(self, tokens: Sequence[int]) -> Tensor:
        """Read tokens as ``step`` does, and return the input of the head, (rows, D) float32."""
        self._check(tokens, self._clocked)
        self._tokens[: len(tokens)] = tokens
        return self._hidden(len(tokens), self._batch.token, self._batch.slot, *self._clock)

    def hidden(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Read one token of each of some sequences and return the input of the head, (rows, D) float32.

        The states in ``slots``, all different, are changed in place.

        Args:
            tokens, slots: (rows,) integers.
            positions: (rows,) tokens that each sequence has read, in one document. The clock of the network is not
                used.

        Raises:
            ValueError: a token is not in the vocabulary, there is no such slot, or a position is negative.
        """
        given = [x.tolist() for x in (tokens, slots, positions)]
        self._check(given[0], self._rows)
        lists = [(c_int64 * len(tokens))(*numbers) for numbers in (*given, [0] * len(tokens))]
        return self._hidden(len(tokens), *map(ctypes.addressof, lists))

    def _hidden(self, rows: int, *lists: int) -> Tensor:
        hidden = torch.empty(rows, self._features, dtype=torch.float32, device="cpu")
        self._run(_BatchStruct(rows, *lists, None, hidden.data_ptr()))
        return hidden

    def _check(self, tokens: Sequence[int], most: int) -> None:
        if not 0 < len(tokens) <= most:
            raise ValueError(f"a call must have 1 to {most} sequences, one token of each; got {len(tokens)}.")
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise ValueError(f"tokens must be ids in 0..{self._vocabulary - 1}; got {list(tokens)}.")

    def _run(self, batch: _BatchStruct) -> None:
        network = ctypes.byref(self._network)
        threads = max(1, min(torch.get_num_threads(), batch.rows * self._products // WEIGHTS_PER_THREAD))
        if threads not in self._room:  # it is zero before the first call
            numbers = _function("decoding_room", c_int64, (c_void_p, c_int64))(network, threads)
            try:
                self._room[threads] = torch.zeros(numbers, dtype=torch.float32, device="cpu")
            except RuntimeError as error:
                message = f"decoding needs {4 * numbers:,} bytes to work in; the system refused them."
                raise MemoryError(message) from error
        step = _function("decoding_step", c_int64, (c_void_p, c_void_p, c_void_p, c_int64))
        if step(network, ctypes.byref(batch), self._room[threads].data_ptr(), threads):
            raise ValueError(
                f"sequences must be in slots 0..{self._sizes['slots'] - 1}, at a position that is not before the start "
                "of their document; a state has another clock. Read the text again."
            )

    def _filled(self, kind: Any, record: Record) -> Any:
        """Return a structure of class ``kind``. Fields that C does not read may be missing in the record."""
        return kind(**{name: self._value(name, field, record.get(name)) for name, field in kind._fields_})

    def _value(self, name: str, kind: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return self._filled(kind, value)
        if isinstance(value, int | float):
            return value
        if value is None:
            if name in self._absent:
                return kind()
            raise ValueError(f"the state or the weights must have {name}, which C reads; they have not.")
        shape = tuple(self._sizes[size] for size in _SHAPES[name].split())
        if isinstance(value, Weights):
            return self._matrix(name, value, *shape)
        paged = self._page_bytes if _SHAPES[name].startswith("slots") else 0
        return self._address(name, value, self._dtypes.get(name, torch.float32), shape, paged)

    def _address(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], paged: int = 0) -> int:
        self._kept.append(tensor)
        return address(name, tensor, dtype, shape, paged)

    def _matrix(self, name: str, weights: Weights, outputs: int, inputs: int) -> _Matrix:
        kind, inputs = weights.weight.dtype, -(-inputs // REGISTER) * REGISTER
        scales = {torch.int8: (outputs,), torch.uint8: (outputs, inputs // GROUP)}.get(kind, ())
        # Rows of the embedding are read one by one, without a scale.
        if kind not in _KINDS or (weights.scale is not None) != bool(scales) or (scales and name == "embedding"):
            given = "without scales" if weights.scale is None else "with scales"
            raise ValueError(f"{name} must be float32, bfloat16, or integers with scales; got {kind} {given}.")
        row = inputs // 2 if kind == torch.uint8 else inputs
        weight = self._address(name, weights.weight, kind, (outputs, row))
        vectors = [(f"{name}.scale", weights.scale, scales), (f"{name}.bias", weights.bias, (outputs,))]
        return _Matrix(
            _KINDS[kind], outputs, inputs, row * kind.itemsize, weight,
            *(None if x is None else self._address(of, x, torch.float32, shape) for of, x, shape in vectors),
        )  # fmt: skip


def content(tensors: Sequence[Tensor]) -> Hashable | None:
    """Compute ``ops.common.content``."""
    if library("decoding") is None or not all(type(x) in PLAIN and x.is_cpu and x.is_contiguous() for x in tensors):
        return None
    count = len(tensors)
    addresses = (c_void_p * count)(*(x.data_ptr() for x in tensors))
    sizes = (c_int64 * count)(*(x.nbytes for x in tensors))
    threads = max(1, min(torch.get_num_threads(), sum(sizes) // WEIGHTS_PER_THREAD))
    function = _function("decoding_content", c_int64, (c_void_p, c_void_p, c_int64, c_int64))
    return function(addresses, sizes, count, threads), *((x.dtype, x.shape) for x in tensors)


def samples_in_c(logits: Tensor) -> bool:
    """Return whether ``first_broken`` and ``sample`` support these logits."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and library("decoding") is not None


def first_broken(logits: Tensor) -> int | None:
    """Return the first row of logits (B, V) with a number that is not finite; None if there is none."""
    logits = logits.contiguous()
    function = _function("decoding_first_broken", c_int64, (c_void_p, c_int64, c_int64))
    found = function(address("logits", logits, torch.float32), *logits.shape)
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
    function = _function("decoding_sample", c_int64, (c_void_p, c_int64, c_int64, *(c_void_p,) * 4))
    function(address("logits", logits, torch.float32), rows, vocabulary, *numbers, weights, tokens)
    return list(tokens)


@cache
def _function(name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    loaded = library("decoding")
    assert loaded is not None, "the decoder asks for the library first"
    function = getattr(loaded, name)
    function.restype, function.argtypes = result, arguments
    return function
