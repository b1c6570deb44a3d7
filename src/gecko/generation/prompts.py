"""What a caller may give as a prompt, and as a seed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

_SEEDS = 1 << 64
Prompt = Tensor | Sequence[int]
"""Token ids of one text: 1-D tensor, array or list."""


def as_rows(prompts: Prompt | Sequence[Prompt]) -> list[Tensor]:
    """One 1-D integer tensor for each prompt; a 2-D tensor is one for each of its rows.

    Raises:
        TypeError, ValueError: prompts that are no integers, or none at all.
    """
    if isinstance(prompts, list | tuple) and prompts and not _is_id(prompts[0]):
        return [_as_ids(prompt) for prompt in prompts]
    ids = _as_ids(prompts)
    return list(ids.unbind()) if ids.dim() == 2 and len(ids) else [ids]


def as_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One seed for each row: the same for all, one each, or drawn from PyTorch's own generator.

    Raises:
        TypeError: a seed is no whole number.
        ValueError: as many seeds as there are rows are needed, each of 64 bits.
    """
    if seed is None:
        return torch.randint(2**53, (rows,)).tolist()
    if isinstance(seed, Tensor | np.ndarray) and seed.ndim == 0:
        # One number, though Python takes it for something to iterate over.
        seed = seed.item()
    seeds = list(seed) if isinstance(seed, Iterable) else [seed] * rows
    if len(seeds) != rows:
        raise ValueError(f"seed must be one number, or one for each of the {rows} prompts; got {len(seeds)}.")
    return [_as_seed(one) for one in seeds]


def _as_seed(seed: SupportsIndex) -> int:
    """Whole numbers of NumPy and PyTorch count, too."""
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"a seed must be a whole number; got {seed!r}. Try int(...), or None for any.") from error
    if not -_SEEDS // 2 <= number < _SEEDS:
        raise ValueError(f"a seed must be a number of 64 bits; got {number}.")
    return number


def _is_id(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return not hasattr(value, "__len__")


def _as_ids(prompt: object) -> Tensor:
    if isinstance(prompt, str):
        raise TypeError("a prompt must be token ids; got text. Try gecko.data.load_tokenizer(...).encode(text).")
    if isinstance(prompt, list | tuple) and not prompt:
        return torch.empty(0, dtype=torch.int64)
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a prompt must be a 1-D tensor, array or list of token ids; {error}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"a prompt must be integers; got {ids.dtype}. Use .long() if they are token ids.")
    if ids.dim() not in (1, 2):
        raise ValueError(f"a prompt must be 1-D, or 2-D with one text a row; got shape {tuple(ids.shape)}.")
    return ids
