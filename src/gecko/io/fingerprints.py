"""Fingerprints: a short hash of a model's weights, which states and shards of a model name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gecko.io.quantization import plain_tensors


def fingerprint(model: nn.Module, tied: Sequence[str] = ()) -> str:
    """Return a hash of the weights, 16 hexadecimal digits, that changes if any weight changes.

    It hashes the sum of every row of every parameter, so that a large model takes seconds. ``tied`` names two
    parameters that are one tensor, though accelerate may have separated them; the first is left out if they are equal.
    """
    names = [name for name, _ in model.named_parameters()]
    if {*tied} <= {*names} and len({hash_of([("", stored_weight(model, name))]) for name in tied}) == 1:
        names.remove(tied[0])
    return hash_of((name, stored_weight(model, name)) for name in names)


def hash_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of named weights, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(name.encode())
        for tensor in plain_tensors(weight):
            digest.update(_row_sums(tensor.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def stored_weight(model: nn.Module, name: str) -> Tensor:
    """Return a parameter; if accelerate has offloaded it, from the hook of its module or a parent that holds it."""
    path = name.split(".")
    # Not get_parameter: torch.func.functional_call lends tensors that are no nn.Parameter.
    weight: Tensor = getattr(model.get_submodule(".".join(path[:-1])), path[-1])
    for depth in reversed(range(len(path) if weight.is_meta else 0)):
        hook = getattr(model.get_submodule(".".join(path[:depth])), "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            stored = getattr(part, "weights_map", None)
            if stored is not None and (rest := ".".join(path[depth:])) in stored:
                found: Tensor = stored[rest]
                return found
    return weight


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the sums of a matrix's rows, or the elements of a vector, as int32, at memory bandwidth."""
    # The bits of the floats are added as integers, so the result depends neither on an order of sums nor on the device.
    rows = len(tensor) if tensor.dim() > 1 else tensor.numel()
    parts = tensor.reshape(rows, -1).split(max(1, 2**18 * rows // max(1, tensor.numel())))  # stay in the cache
    wide = (part if part.dtype == torch.float64 else part.float() for part in parts)
    return torch.cat([part.view(torch.int32).sum(1, dtype=torch.int32) for part in wide])
