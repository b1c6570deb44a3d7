"""Gecko: language models that read sequences of any length with a state of constant size."""

from __future__ import annotations

from gecko import convert
from gecko.config import GeckoConfig
from gecko.generation import generate
from gecko.model import Gecko, load
from gecko.state import GeckoState
from gecko.version import __version__

__all__ = ["Gecko", "GeckoConfig", "GeckoState", "__version__", "convert", "generate", "load"]
