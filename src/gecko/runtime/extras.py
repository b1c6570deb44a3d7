"""Import of optional dependencies."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, which comes with the package's optional ``extra``.

    Raises:
        ImportError: ``module`` is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is installed but lacks one of its own dependencies must report that itself.
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(
            f"this needs the package {module!r}, which is not installed. Run: pip install 'gecko-lm[{extra}]'"
        ) from error
