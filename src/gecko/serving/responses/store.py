"""Responses in memory, each with the state of its conversation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gecko.serving.limits import ApiError
from gecko.state import GeckoState

MAX_RESPONSES = 10_000
"""Maximum number of stored responses, whatever their size."""


@dataclass(frozen=True)
class StoredResponse:
    """A finished response."""

    body: bytes
    """The response as JSON."""
    state: GeckoState
    """State of the conversation, on the CPU."""
    unread: Sequence[int]
    """Ids at the end of the answer that the state has not read yet."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + self.state.num_bytes + 8 * len(self.unread)


class ResponseStore:
    """Least-recently-used store of responses; thread-safe.

    Args:
        max_bytes: maximum memory of all responses, with their states. A larger response is not stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._found: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response; the least recently used ones are evicted."""
        if response.num_bytes > self._max_bytes:
            return
        with self._lock:
            self._found[response_id] = response
            self._bytes += response.num_bytes
            while self._bytes > self._max_bytes or len(self._found) > MAX_RESPONSES:
                self._bytes -= self._found.popitem(last=False)[1].num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if there is none with this id, or it was evicted."""
        with self._lock:
            if response_id in self._found:
                self._found.move_to_end(response_id)
            return self._found.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it was there."""
        with self._lock:
            response = self._found.pop(response_id, None)
            self._bytes -= 0 if response is None else response.num_bytes
            return response is not None


def response_not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:100]}' not found.", code="response_not_found")
