"""Saved reading states that requests may name."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

from gecko.serving.errors import ApiError
from gecko.state import GeckoState

SUFFIX = ".state"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEPT = 4
"""States kept in memory after use."""


class SavedStates:
    """The files ``NAME.state`` of a folder. Replaced files are read anew.

    Args:
        folder: None where no states are offered.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: OrderedDict[tuple[str | int, ...], GeckoState] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """What may be asked for now."""
        if self._folder is None:
            return []
        names = (path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))
        return sorted(name for name in names if _NAME.fullmatch(name))

    def load(self, name: str) -> GeckoState:
        """The state of one row with this name; may be called from any thread.

        Raises:
            ApiError: 404 where there is none, 400 where its file is damaged or something else.
        """
        if self._folder is None:
            raise ApiError(400, "no states are offered here: gecko serve --states FOLDER", param="state")
        path = self._folder / f"{name}{SUFFIX}"
        if not _NAME.fullmatch(name) or not path.is_file():
            raise ApiError(404, f"there is no state {name[:100]!r}", code="state_not_found", param="state")
        try:
            return self._load(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).replace(str(path), f"the state {name!r}")
            raise ApiError(400, reason, code="invalid_state", param="state") from error

    def _load(self, path: Path) -> GeckoState:
        facts = path.stat()
        # All states of a model have one size, and a copy may have the date of what was there before.
        key = (path.name, facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size)
        with self._lock:
            state = self._kept.pop(key, None)
        if state is None:
            state = GeckoState.load(path)
        if state.batch_size != 1:
            raise ValueError(f"a text is continued from a state of one row; {path} has {state.batch_size}.")
        with self._lock:
            self._kept[key] = state
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return state
