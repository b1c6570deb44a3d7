"""States after beginnings of prompts, so that what many prompts share is read once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.state import GeckoState

_KNOWN_BEGINNINGS = 1 << 16
"""Keys that are remembered without a state, about 150 bytes each."""


@dataclass(frozen=True)
class Prefix:
    """What is known of a prompt before it is read."""

    length: int
    """Tokens of its longest beginning that has a state."""
    state: GeckoState | None
    """After them; None if ``length`` is 0."""
    borders: Mapping[int, bytes]
    """Lengths of beginnings after which the state is worth keeping, with its key."""


class PrefixCache:
    """States after whole chunks of prompts, least recently used out first.

    A state is constant in size but large, so it is not kept after every chunk. Of one prompt stay the states after
    its last chunk, for those that go on from it; after its last whole piece, for those that end otherwise; and after
    what it shares with earlier prompts, which shows that more will share it.

    Args:
        max_bytes: most memory of all states together.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1; got {max_bytes}. Without a cache, give None instead.")
        self.max_bytes = max_bytes
        self.hits = 0
        """Prompts whose beginning had a state."""
        self.misses = 0
        self.bytes = 0
        """Memory of the states now."""
        self._states: OrderedDict[bytes, GeckoState] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def find(self, model: str, prompt: Tensor, chunk_size: int, piece: int) -> Prefix:
        """The longest beginning with a state. One token at least is left to read: it says what comes next.

        Args:
            model: name of the weights; states of others do not count.
            prompt: 1-D int64, from the start of a text.
        """
        keys = list(_keys(model, prompt[:-1], chunk_size))
        read = max((count for count, key in enumerate(keys, 1) if key in self._states), default=0)
        shared = max((count for count, key in enumerate(keys, 1) if key in self._known), default=0)
        self._remember(keys)
        whole_pieces = len(prompt[:-1]) // piece * piece // chunk_size
        borders = {count * chunk_size: keys[count - 1] for count in (shared, whole_pieces, len(keys)) if count > read}
        if read == 0:
            self.misses += 1
            return Prefix(0, None, borders)
        self.hits += 1
        self._states.move_to_end(keys[read - 1])
        return Prefix(read * chunk_size, self._states[keys[read - 1]], borders)

    def keep(self, key: bytes, state: GeckoState) -> None:
        """Keep the state after the beginning with this key, one of ``Prefix.borders``."""
        if key in self._states or state.num_bytes > self.max_bytes:
            return
        # What a call returns may be views of tensors much larger than themselves.
        self._states[key] = state.map(lambda x: x.clone(memory_format=torch.contiguous_format))
        self.bytes += state.num_bytes
        while self.bytes > self.max_bytes:
            _, oldest = self._states.popitem(last=False)
            self.bytes -= oldest.num_bytes

    def _remember(self, keys: list[bytes]) -> None:
        # The beginnings of long prompts come last, so that they are forgotten last.
        for key in reversed(keys):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _KNOWN_BEGINNINGS:
            self._known.popitem(last=False)


def _keys(model: str, tokens: Tensor, chunk_size: int) -> Iterator[bytes]:
    """A key for each whole chunk: a hash of all tokens up to its end, that of the chunk before included."""
    content = memoryview(tokens.numpy().tobytes())
    size = chunk_size * tokens.element_size()
    key = hashlib.sha256(model.encode()).digest()
    for end in range(size, len(content) + 1, size):
        key = hashlib.sha256(key + content[end - size : end]).digest()
        yield key
