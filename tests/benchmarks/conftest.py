"""Benchmarks are scripts: put their folder on the path, as it is when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
