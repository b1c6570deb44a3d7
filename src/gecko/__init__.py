"""Gecko: language models that read sequences of any length with a state of constant size.

The public names are imported on first use. ``import gecko`` and the help of the command line do not import PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gecko.runtime.process import __version__

if TYPE_CHECKING:
    from gecko import convert
    from gecko.config import GeckoConfig
    from gecko.inference import generate, stream
    from gecko.models.gecko import Gecko, load
    from gecko.state import GeckoState
else:
    _MODULES = {
        "Gecko": "gecko.models.gecko",
        "GeckoConfig": "gecko.config",
        "GeckoState": "gecko.state",
        "generate": "gecko.inference",
        "load": "gecko.models.gecko",
        "stream": "gecko.inference",
    }

    def __getattr__(name: str) -> Any:
        if name == "convert":
            return import_module("gecko.convert")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = ["Gecko", "GeckoConfig", "GeckoState", "__version__", "convert", "generate", "load", "stream"]
