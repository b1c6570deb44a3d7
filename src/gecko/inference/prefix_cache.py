"""Cache of states after prompt prefixes, so that shared prefixes are prefilled once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gecko.state import GeckoState

_KNOWN_PREFIXES = 1 << 16
"""Maximum number of keys that are remembered without a state, about 150 bytes each."""

Key = tuple[bytes, bytes]
"""Key of a prefix: the hash of its whole chunks, and the bytes of its tokens after them."""


class Entry(NamedTuple):
    """State after a prefix, and the logits (V,) of the next token if they are known."""

    state: GeckoState
    logits: Tensor | None

    @property
    def bytes(self) -> int:
        return self.state.num_bytes + (0 if self.logits is None else self.logits.nbytes)


class Prefix(NamedTuple):
    """Result of looking up a prompt in the cache."""

    length: int
    """Tokens of the longest cached prefix."""
    state: GeckoState | None
    """State after them; None if ``length`` is 0."""
    logits: Tensor | None
    """(V,), of the next token, if the prefix is the whole prompt; else None."""
    borders: Mapping[int, Key]
    """Prefix lengths after which the state should be kept, with the key of each. The last one is the whole prompt."""


class PrefixCache:
    """Least-recently-used cache of states after prompts and after whole chunks of prompts.

    States have constant size but are large, so up to three are kept per prompt: at its end with the logits of the next
    token, for the same prompt and for prompts that continue it; after its last whole piece, for prompts that end
    differently; and after the whole chunks that it shares with an earlier prompt, which other prompts are likely to
    share. All states together take ``max_bytes`` at most.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(
                f"max_bytes must be at least 1; got {max_bytes}. Pass None instead of a cache to disable it."
            )
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self.bytes = 0
        """Memory of the cached states and logits."""
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._tails: defaultdict[bytes, set[bytes]] = defaultdict(set)
        """Second halves of the keys of the entries by their first halves."""
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def find(self, model: str, prompt: Tensor, chunk_size: int, piece: int) -> Prefix:
        """Find the longest cached prefix of a prompt (1-D int64, from the start of a sequence): the whole prompt with
        its logits, or one that leaves at least one token. ``model`` is the fingerprint of the weights."""
        hashes = list(_hashes(model, prompt, chunk_size))
        tail = prompt[(len(hashes) - 1) * chunk_size :].numpy().tobytes()
        length, entry = self._longest(hashes, prompt, chunk_size)
        shared = max((count for count, key in enumerate(hashes) if count and key in self._known), default=0)
        whole_pieces = (len(prompt) - 1) // piece * piece // chunk_size
        for key in reversed(hashes[1:]):  # short prefixes last, so that they are evicted last
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > _KNOWN_PREFIXES:
            self._known.popitem(last=False)
        borders = {count * chunk_size: (hashes[count], b"") for count in (shared, whole_pieces)}
        borders[len(prompt)] = hashes[-1], tail
        borders = {border: key for border, key in borders.items() if border > length}
        self.hits, self.misses = self.hits + (entry is not None), self.misses + (entry is None)
        if entry is None:
            return Prefix(0, None, None, borders)
        return Prefix(length, entry.state, entry.logits if length == len(prompt) else None, borders)

    def keep(self, key: Key, state: GeckoState, logits: Tensor | None = None) -> None:
        """Keep the state after the prefix with this key, one of ``Prefix.borders``, and the logits after it."""
        earlier = self._entries.get(key)
        if earlier is not None and (logits is None or earlier.logits is not None):
            return
        entry = Entry(state, logits)
        if entry.bytes > self.max_bytes:
            return
        self.bytes += entry.bytes - (0 if earlier is None else earlier.bytes)
        # The tensors of a state that a model returned may be views of much larger tensors.
        own = state.map(lambda x: x.clone(memory_format=torch.contiguous_format))
        self._entries[key] = Entry(own, None if logits is None else logits.clone())
        self._tails[key[0]].add(key[1])
        while self.bytes > self.max_bytes:
            (chunks, tail), evicted = self._entries.popitem(last=False)
            self.bytes -= evicted.bytes
            self._tails[chunks].remove(tail)
            if not self._tails[chunks]:
                del self._tails[chunks]

    def _longest(self, hashes: list[bytes], prompt: Tensor, chunk_size: int) -> tuple[int, Entry | None]:
        """Return the length of the longest cached prefix and its entry, which is now the one used last."""
        content, size = prompt.numpy().tobytes(), prompt.element_size()
        for count in reversed(range(len(hashes))):
            rest = content[count * chunk_size * size :]
            for tail in sorted(self._tails.get(hashes[count], ()), key=len, reverse=True):
                key, length = (hashes[count], tail), count * chunk_size + len(tail) // size
                if rest.startswith(tail) and (length < len(prompt) or self._entries[key].logits is not None):
                    self._entries.move_to_end(key)
                    return length, self._entries[key]
        return 0, None


def _hashes(model: str, tokens: Tensor, chunk_size: int) -> Iterator[bytes]:
    """Yield the hash of no token and, for each whole chunk, that of its tokens and of the hash before."""
    content = memoryview(tokens.numpy().tobytes())
    size = chunk_size * tokens.element_size()
    key = hashlib.sha256(model.encode()).digest()
    yield key
    for end in range(size, len(content) + 1, size):
        key = hashlib.sha256(key + content[end - size : end]).digest()
        yield key
