"""Saved states: the files of a folder that requests may name."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from gecko.serving.limits import ApiError
from gecko.state import GeckoState

SUFFIX = ".state"
_STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_LOADED = 4
"""Number of states kept in memory after use."""
_HEADER_BYTES, _TENSOR_BYTES = 1 << 13, 1 << 8
"""Upper bounds of the metadata of a file, and of the description of one tensor."""


class SavedStates:
    """Files ``NAME.state`` of a folder, with a cache of loaded states; thread-safe. Replaced files are loaded again.

    Args:
        folder: None if the server offers no states.
        max_bytes: limit for all files together up to which states are saved; 0: states are not saved or deleted.
    """

    def __init__(self, folder: Path | None, max_bytes: int = 0) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._loaded: OrderedDict[tuple[str | int, ...], GeckoState] = OrderedDict()
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def names(self) -> list[str]:
        """Return the names of the states in the folder."""
        return [path.name.removesuffix(SUFFIX) for path in self._paths()]

    def describe(self) -> list[dict[str, Any]]:
        """Return name, size and time of each state in the folder."""
        found = []
        for path in self._paths():
            with suppress(FileNotFoundError):  # deleted just now
                found.append(_describe(path))
        return found

    def load(self, name: str) -> GeckoState:
        """Load the state with this name.

        Raises:
            ApiError: 404 if there is no such state; 400 if its file is damaged or does not hold a state of one row.
        """
        path = self._path(name)
        if not path.is_file():
            raise _not_found(name)
        try:
            return self._load(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).replace(str(path), f"the state {name!r}")
            raise ApiError(400, reason, code="invalid_state", param="state") from error

    def check_new(self, name: str) -> None:
        """Check that a state may be saved under a name.

        Raises:
            ApiError: 400 for a name that is not allowed, 403 if states are not saved, 409 if the name is taken.
        """
        self._check_writable()
        if not _STATE_NAME.fullmatch(name):
            raise ApiError(
                400, "name must have 1 to 100 letters, digits, '.', '_' and '-', and begin with a letter or a digit; "
                f"got {name[:100]!r}",
                code="invalid_value", param="name",
            )  # fmt: skip
        if self._path(name).exists():
            raise ApiError(
                409, f"there is a state {name!r} already; delete it, or choose another name", code="state_exists",
                param="name",
            )  # fmt: skip

    def save(self, name: str, state: GeckoState) -> dict[str, Any]:
        """Write a new file atomically and describe it.

        Raises:
            ApiError: as ``check_new``, and 400 if the folder would exceed its limit.
        """
        with self._writing:
            self.check_new(name)
            size = state.num_bytes + _HEADER_BYTES + _TENSOR_BYTES * len(state.tensors())
            used = sum(one["bytes"] for one in self.describe())
            if used + size > self._max_bytes:
                raise ApiError(
                    400, f"all states together must have at most {self._max_bytes:,} bytes; there are {used:,}, and "
                    f"this one has {size:,}. Delete some",
                    code="states_full",
                )  # fmt: skip
            path = self._path(name)
            state.save(path)
            return _describe(path) | {"position": state.position[0]}

    def delete(self, name: str) -> None:
        """Delete the file of a state; ApiError 404 if there is none, 403 if states are not deleted."""
        self._check_writable()
        path = self._path(name)
        with self._writing:
            if not path.is_file():
                raise _not_found(name)
            path.unlink()

    def position(self, name: str) -> dict[str, Any]:
        """Describe one state with the number of tokens that it has read; errors as for ``load``."""
        state = self.load(name)
        return _describe(self._path(name)) | {"position": state.position[0]}

    def _path(self, name: str) -> Path:
        """Return the path of a state, which stays inside the folder; ApiError if the name or the folder is missing."""
        if self._folder is None:
            raise ApiError(
                400, "this server offers no states; start it with gecko serve --states FOLDER", param="state"
            )
        if not _STATE_NAME.fullmatch(name):
            raise _not_found(name)
        return self._folder / f"{name}{SUFFIX}"

    def _paths(self) -> list[Path]:
        if self._folder is None:
            return []
        found = (path for path in self._folder.glob(f"*{SUFFIX}") if path.is_file())
        return sorted(path for path in found if _STATE_NAME.fullmatch(path.name.removesuffix(SUFFIX)))

    def _check_writable(self) -> None:
        if self._folder is None or not self._max_bytes:
            raise ApiError(
                403, "this server does not save or delete states; start it with gecko serve --states FOLDER "
                "--states-disk MB",
                code="states_read_only",
            )  # fmt: skip

    def _load(self, path: Path) -> GeckoState:
        facts = path.stat()
        # Size and modification time may equal those of the replaced file: all states of a model have the same size.
        key = (path.name, facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size)
        with self._lock:
            state = self._loaded.pop(key, None)
        if state is None:
            state = GeckoState.load(path)
        if state.batch_size != 1:
            raise ValueError(f"a state must have one row to continue a text; {path} has {state.batch_size}.")
        with self._lock:
            self._loaded[key] = state
            while len(self._loaded) > _MAX_LOADED:
                self._loaded.popitem(last=False)
        return state


def _describe(path: Path) -> dict[str, Any]:
    facts = path.stat()
    return {
        "id": path.name.removesuffix(SUFFIX), "object": "state", "bytes": facts.st_size, "created": int(facts.st_mtime)
    }  # fmt: skip


def _not_found(name: str) -> ApiError:
    return ApiError(404, f"there is no state {name[:100]!r}", code="state_not_found", param="state")
