"""Megalodon-7B, the paper's baseline, trained as Gecko-7B is. Set ``data.source`` and ``data.tokenizer``."""

from __future__ import annotations

import dataclasses

from gecko.config import GeckoConfig
from gecko.recipes.gecko_7b import gecko_7b
from gecko.train import Run


def megalodon_7b() -> Run:
    return dataclasses.replace(gecko_7b(), model=GeckoConfig.preset("megalodon-7b"), output="runs/megalodon_7b")
