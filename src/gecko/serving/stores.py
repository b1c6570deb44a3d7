"""What the server keeps between requests: saved states in the files of a folder, and responses in memory."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from gecko.serving.limits import ApiError, invalid
from gecko.state import GeckoState

SUFFIX = ".state"
MAX_RESPONSES = 10_000
_STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_LOADED = 4
"""Number of states kept in memory after use."""
_HEADER_BYTES, _TENSOR_BYTES = 1 << 13, 1 << 8
"""Upper bounds of the metadata of a file, and of the description of one tensor."""


class SavedStates:
    """Files ``NAME.state`` of a folder, with a cache of loaded states; thread-safe. Replaced files are loaded again.

    Without ``folder`` the server offers no states. States are saved up to ``max_bytes`` of all files together; with 0,
    they are not saved or deleted.
    """

    def __init__(self, folder: Path | None, max_bytes: int = 0) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self.saves = folder is not None and max_bytes > 0
        """Whether states may be saved and deleted."""
        # Size and modification time may equal those of a replaced file: all states of a model have the same size.
        self._read = lru_cache(_MAX_LOADED)(lambda path, inode, changed, modified, size: GeckoState.load(path))
        self._writing = threading.Lock()

    def describe_all(self) -> list[dict[str, Any]]:
        """Return name, size and time of each state in the folder."""
        found = []
        for path in [] if self._folder is None else sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(FileNotFoundError):  # deleted just now
                if path.is_file() and _STATE_NAME.fullmatch(path.name.removesuffix(SUFFIX)):
                    found.append(_describe(path))
        return found

    def describe(self, name: str) -> dict[str, Any]:
        """Describe one state with the number of tokens that it has read; errors as for ``load``."""
        position = self.load(name).position[0]
        return {**_describe(self._path(name)), "position": position}

    def load(self, name: str) -> GeckoState:
        """Load the state with this name. Raise ApiError 404 if there is no such state; 400 if its file is damaged or
        does not hold a state of one row."""
        path = self._path(name, exists=True)
        try:
            facts = path.stat()
            state = self._read(path, facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size)
            if state.batch_size != 1:
                raise ValueError(f"a state must have one row to continue a text; {path} has {state.batch_size}.")
            return state
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).replace(str(path), f"the state {name!r}")
            raise ApiError(400, reason, code="invalid_state", param="state") from error

    def check_new(self, name: str) -> None:
        """Check that a state may be saved under a name. Raise ApiError 400 for a name that is not allowed, 403 if
        states are not saved, 409 if the name is taken."""
        self._check_writable()
        if not _STATE_NAME.fullmatch(name):
            rule = "1 to 100 letters, digits, '.', '_' and '-', and begin with a letter or a digit"
            raise invalid("name", f"name must have {rule}; got {name[:100]!r}")
        if self._path(name).exists():
            message = f"there is a state {name!r} already; delete it, or choose another name"
            raise ApiError(409, message, code="state_exists", param="name")

    def save(self, name: str, state: GeckoState) -> dict[str, Any]:
        """Write a new file atomically and describe it. Errors are those of ``check_new``; ApiError 400 if the folder
        would exceed its limit."""
        with self._writing:
            self.check_new(name)
            size = state.num_bytes + _HEADER_BYTES + _TENSOR_BYTES * len(state.tensors())
            used = sum(one["bytes"] for one in self.describe_all())
            if used + size > self._max_bytes:
                there = f"there are {used:,}, and this one has {size:,}"
                message = f"all states together must have at most {self._max_bytes:,} bytes; {there}. Delete some"
                raise ApiError(400, message, code="states_full")
            path = self._path(name)
            state.save(path)
            return {**_describe(path), "position": state.position[0]}

    def delete(self, name: str) -> None:
        """Delete the file of a state; ApiError 404 if there is none, 403 if states are not deleted."""
        self._check_writable()
        with self._writing:
            self._path(name, exists=True).unlink()

    def _path(self, name: str, *, exists: bool = False) -> Path:
        """Return the path of a state, which stays inside the folder. Raise ApiError if the name is none, there is no
        folder, or the file has to exist and does not."""
        if self._folder is None:
            message = "this server offers no states; start it with gecko serve --states FOLDER"
            raise ApiError(400, message, param="state")
        path = self._folder / f"{name}{SUFFIX}"
        if not _STATE_NAME.fullmatch(name) or (exists and not path.is_file()):
            raise ApiError(404, f"there is no state {name[:100]!r}", code="state_not_found", param="state")
        return path

    def _check_writable(self) -> None:
        if not self.saves:
            start = "start it with gecko serve --states FOLDER --states-disk MB"
            message = f"this server does not save or delete states; {start}"
            raise ApiError(403, message, code="states_read_only")


def _describe(path: Path) -> dict[str, Any]:
    facts, name = path.stat(), path.name.removesuffix(SUFFIX)
    return {"id": name, "object": "state", "bytes": facts.st_size, "created": int(facts.st_mtime)}


@dataclass(frozen=True)
class StoredResponse:
    """A finished response."""

    body: bytes
    state: GeckoState
    """State of the conversation, on the CPU."""
    unread: Sequence[int]
    """Ids at the end of the answer that the state has not read yet."""
    functions: frozenset[str] = frozenset()
    """Functions that the conversation has been told, as JSON."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """Names of the functions that the response calls, by the ids of the calls."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + self.state.num_bytes + 8 * len(self.unread) + sum(map(len, self.functions))


class ResponseStore:
    """Least-recently-used store of responses, which take ``max_bytes`` at most with their states; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._found: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response, unless it is too large alone; the least recently used ones are evicted."""
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

    def find(self, response_id: str) -> StoredResponse:
        """Return a response; ApiError 404 if there is none with this id."""
        if (found := self.get(response_id)) is None:
            message = f"Response with id '{response_id[:100]}' not found."
            raise ApiError(404, message, code="response_not_found")
        return found

    def delete(self, response_id: str) -> None:
        """Delete a response; ApiError 404 if there is none with this id."""
        self.find(response_id)
        with self._lock:
            response = self._found.pop(response_id, None)
            self._bytes -= 0 if response is None else response.num_bytes
