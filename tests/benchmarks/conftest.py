"""Benchmarks are scripts: their folder is on the path, as it is when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
