"""Cache of states after prompt prefixes, so that shared prefixes are prefilled once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gecko.state import GeckoState

_KNOWN_PREFIXES = 1 << 16
"""Maximum number of keys that are remembered without a state, about 150 bytes each."""


@dataclass(frozen=True)
class Prefix:
    """Result of looking up a prompt in the cache."""

    length: int
    """Tokens of the longest cached prefix."""
    state: GeckoState | None
    """State after them; None if ``length`` is 0."""
    borders: Mapping[int, bytes]
    """Prefix lengths after which the state should be kept, with the key of each."""


class PrefixCache:
    """Least-recently-used cache of states after whole chunks of prompts.

    States have constant size but are large, so up to three are kept per prompt: after its last chunk, for prompts that
    continue it; after its last whole piece, for prompts that end differently; and after the prefix that it shares with
    an earlier prompt, which other prompts are likely to share.

    Args:
        max_bytes: maximum memory of all states.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(
                f"max_bytes must be at least 1; got {max_bytes}. Pass None instead of a cache to disable it."
            )
        self.max_bytes = max_bytes
        self.hits = 0
        """Prompts that had a cached prefix."""
        self.misses = 0
        self.bytes = 0
        """Memory of the cached states."""
        self._states: OrderedDict[bytes, GeckoState] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def find(self, model: str, prompt: Tensor, chunk_size: int, piece: int) -> Prefix:
        """Find the longest cached prefix that leaves at least one token, which gives the next token's logits.

        Args:
            model: fingerprint of the weights; states of other weights do not match.
            prompt: 1-D int64, from the start of a sequence.
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
        """Keep the state after the prefix with this key, one of ``Prefix.borders``."""
        if key in self._states or state.num_bytes > self.max_bytes:
            return
        # The tensors of a returned state may be views of much larger tensors.
        self._states[key] = state.map(lambda x: x.clone(memory_format=torch.contiguous_format))
        self.bytes += state.num_bytes
        while self.bytes > self.max_bytes:
            _, oldest = self._states.popitem(last=False)
            self.bytes -= oldest.num_bytes

    def _remember(self, keys: list[bytes]) -> None:
        # Short prefixes are added last, so that they are evicted last.
        for key in reversed(keys):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _KNOWN_PREFIXES:
            self._known.popitem(last=False)


def _keys(model: str, tokens: Tensor, chunk_size: int) -> Iterator[bytes]:
    """Yield a key per whole chunk: the hash of its tokens and of the previous key."""
    content = memoryview(tokens.numpy().tobytes())
    size = chunk_size * tokens.element_size()
    key = hashlib.sha256(model.encode()).digest()
    for end in range(size, len(content) + 1, size):
        key = hashlib.sha256(key + content[end - size : end]).digest()
        yield key
