"""A short name of weights."""

from __future__ import annotations

import hashlib

from torch import nn

from gecko.quantize import plain_tensors


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits: a hash over some numbers of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        for tensor in plain_tensors(parameter):
            digest.update(tensor.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
